from __future__ import annotations

from typing import Any

import pytest

from deployments.engine.settings import EngineSettings


def _settings(**changes: Any) -> EngineSettings:
    given = {"model_path": "/models/m", "served_model": "m", "role": "decode"}
    return EngineSettings(**{**given, **changes})


def test_defaults_are_valid() -> None:
    assert _settings().agent_socket is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("role", "both"),
        ("block_size", 16),
        ("block_size", 0),
        ("kv_cache_bytes", 0),
        ("max_num_seqs", -1),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 0),
        ("tensor_parallel_size", 0),
        ("served_model", ""),
        ("owner", ""),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        _settings(**{field: value})


def test_ranks_have_as_many_cores_each() -> None:
    assert _settings(tensor_parallel_size=2, rank_cores=(0, 1, 2, 3)).rank_cores == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="rank_cores must be as many"):
        _settings(tensor_parallel_size=2, rank_cores=(0, 1, 2))


def test_a_step_must_hold_a_token_of_each_running_request() -> None:
    with pytest.raises(ValueError, match="at least max_num_seqs"):
        _settings(max_num_seqs=64, max_num_batched_tokens=32)
