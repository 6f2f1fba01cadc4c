"""The real model for the contract tests: the bundled one, prepared once, unless one is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import BUNDLED_MODEL, default_cache_dir
from cluster.model_store import prepare_model
from tests.contract.engine_harness import Harness, running_engine
from tests.contract.tiny_models import LARGE_BLOCKS, make_model

VARIABLE = "HEADWATER_TEST_MODEL"


@pytest.fixture(scope="session", autouse=True)
def named_model() -> None:
    """Set HEADWATER_TEST_MODEL, which the harnesses of this folder read."""
    if not os.environ.get(VARIABLE):
        prepared = prepare_model(BUNDLED_MODEL, None, default_cache_dir(), lambda _line: None)
        os.environ[VARIABLE] = str(prepared.path)


@pytest.fixture(scope="session")
def large_block_model(named_model: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, whose blocks are as large as the bundled model's."""
    return make_model(tmp_path_factory.mktemp("large-blocks"), "Llama", **LARGE_BLOCKS)


@pytest.fixture(scope="session")
def small_model(named_model: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, for what depends on no text."""
    return make_model(tmp_path_factory.mktemp("small"), "Llama")


@pytest.fixture(scope="module")
def harness(small_model: Path) -> Iterator[Harness]:
    """An engine with the harness's own settings; a module that wants others has its own."""
    with running_engine(model_path=str(small_model)) as harness:
        yield harness
