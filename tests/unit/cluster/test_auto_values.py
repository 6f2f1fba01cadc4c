"""What auto becomes on which nodes, and what is said of a configured value that is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.auto_values import has_auto, in_words, resolve
from cluster.config import Config, ModelConfig
from cluster.errors import ConfigError
from cluster.model_store import BUNDLED_FIGURES, ModelFigures
from cluster.node_facts import NodeFacts
from tests.fakes.nodes import FAST, SLOW

GPU = replace(SLOW, has_gpu=True)


def config(**sections: object) -> Config:
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("nodes", "dtype"),
    [
        ([FAST], "bfloat16"),
        ([SLOW], "float32"),
        ([FAST, SLOW], "float32"),
    ],
)
def test_dtype_auto_suits_every_node(nodes: list[NodeFacts], dtype: str) -> None:
    found = resolve(config(), nodes, BUNDLED_FIGURES)
    assert found.config.model.dtype == found.choices["model.dtype"].value == dtype
    assert found.warnings == ()
    assert ("slow" in found.choices["model.dtype"].why) == (SLOW in nodes)


@pytest.mark.parametrize(
    ("own", "dtype"), [("float16", "float16"), ("bfloat16", "bfloat16"), ("fp8", "bfloat16")]
)
def test_dtype_auto_on_gpus_is_the_checkpoints(own: str, dtype: str) -> None:
    found = resolve(config(), [GPU], ModelFigures(own, 100))
    assert found.config.model.dtype == dtype


def test_configured_slow_dtype_is_kept_with_one_warning() -> None:
    for dtype in ("bfloat16", "float16"):
        found = resolve(config(model={"dtype": dtype}), [SLOW, FAST, SLOW], BUNDLED_FIGURES)
        assert found.config.model.dtype == dtype
        (warning,) = found.warnings
        assert dtype in warning and SLOW.slow[dtype] in warning and "fast" not in warning


def test_configured_dtype_that_is_not_slow_gives_no_warning() -> None:
    for dtype, node in (("bfloat16", FAST), ("float32", SLOW), ("bfloat16", GPU)):
        assert resolve(config(model={"dtype": dtype}), [node], BUNDLED_FIGURES).warnings == ()


def test_unresolved_values_build_nothing() -> None:
    assert has_auto(config())
    with pytest.raises(ConfigError, match=r"model\.dtype is auto"):
        _ = ModelConfig().resolved_dtype
    resolved = resolve(config(), [FAST], BUNDLED_FIGURES).config
    assert not has_auto(resolved)


def test_choices_in_words_name_value_and_reason() -> None:
    words = in_words(resolve(config(), [FAST], BUNDLED_FIGURES).choices)
    assert "model.dtype bfloat16 (" in words and "avx512_bf16" in words
    assert "\n" not in words
