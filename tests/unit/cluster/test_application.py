"""What the application builder asks of every worker."""

from __future__ import annotations

from dataclasses import fields

from cluster.application import BuildArguments, _client
from cluster.config import Config, EngineConfig, ModelConfig
from kvcache.identity import Namespace


def test_the_ingress_expects_the_configured_settings_of_every_worker_under_their_names() -> None:
    config = Config(
        model=ModelConfig(served_name="m", dtype="float32", max_model_len=1024),
        engine=EngineConfig(block_size_tokens=64),
    )
    expected = _client(BuildArguments(config=config, model_path="/m", secret_file="/s"))
    assert expected.expected_namespace == {
        "model": "m",
        "block_size": "64",
        "dtype": "float32",
        "max_model_len": "1024",
    }
    known = {field.name for field in fields(Namespace)} | {"max_model_len"}
    assert expected.expected_namespace.keys() <= known
