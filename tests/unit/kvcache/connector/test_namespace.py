"""What a block's identity has of the length that is served."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvcache.connector.layout import by_length


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(rope_parameters={"rope_type": "longrope", "short_factor": [1.0]}),
        SimpleNamespace(rope_scaling={"type": "su"}),
        SimpleNamespace(rope_parameters={"full_attention": {"rope_type": "longrope"}}),
    ],
)
def test_keys_of_longrope_models_are_of_one_length(config: object) -> None:
    assert by_length(config, 4096) != by_length(config, 8192)


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(),
        SimpleNamespace(rope_parameters=None, rope_scaling=None),
        SimpleNamespace(rope_parameters={"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_those_of_other_models_are_shared_by_all_lengths(config: object) -> None:
    assert by_length(config, 4096) == by_length(config, 8192) == ""
