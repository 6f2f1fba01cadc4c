"""What the application builder asks of every worker."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from cluster.application import BuildArguments, _client, _worker, build
from cluster.config import (
    Config,
    EngineConfig,
    ModelConfig,
    StateConfig,
)
from cluster.config_keys import KeysConfig
from cluster.config_links import LinksConfig
from cluster.config_slab import SlabConfig
from cluster.config_tenants import TenantsConfig
from cluster.config_workers import WorkerRoleConfig, WorkersConfig
from deployments.edge.key_file import KeySettings
from deployments.flow.flow_types import Role
from deployments.links.listening import ListenSettings
from kvcache.connector.config import ConnectorConfig
from kvcache.identity import Namespace
from tests.fakes.nodes import resolved


def test_the_ingress_expects_the_configured_settings_of_every_worker_under_their_names() -> None:
    config = Config(
        model=ModelConfig(served_name="m", dtype="float32", max_model_len=1024),
        engine=EngineConfig(block_size_tokens=64),
    )
    expected = _client(BuildArguments(config=resolved(config), model_path="/m", secret_file="/s"))
    assert expected.expected_namespace == {
        "model": "m",
        "block_size": "64",
        "dtype": "float32",
        "max_model_len": "1024",
        "tensor_parallel_size": "1",
    }
    beside = {"max_model_len", "tensor_parallel_size"}
    known = {field.name for field in fields(Namespace)} | beside
    assert expected.expected_namespace.keys() <= known


def deployments_of(config: Config) -> dict[str, Any]:
    """Each worker deployment by name, with the settings that it is bound to."""
    args = BuildArguments(config=resolved(config), model_path="/m", secret_file="/s")
    return {role: _worker(args, role)._bound_deployment for role in Role}


def test_a_serve_without_our_code_can_load_the_scaling_policy_and_ask_it(tmp_path: Path) -> None:
    decode = WorkerRoleConfig(replicas=1, replicas_max=2)
    found = deployments_of(Config(workers=WorkersConfig(decode=decode)))[Role.DECODE]
    policy = found._deployment_config.autoscaling_config.policy
    (tmp_path / "policy").write_bytes(policy.get_serialized_policy_def())
    program = """
import sys
from types import SimpleNamespace
from ray import cloudpickle

kwargs = eval(sys.argv[2])
made = cloudpickle.loads(open(sys.argv[1], "rb").read())(**kwargs)
made._tell = lambda note: print(note.action, note.why)
context = SimpleNamespace(policy_state={}, current_time=1.0, target_num_replicas=1,
                          raw_metrics={}, running_replicas=[])
print(made(context)[0], [name for name in sys.modules if name.startswith("deployments")])
"""
    command = [sys.executable, "-I", "-c", program, tmp_path / "policy", repr(policy.policy_kwargs)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["holds no worker runs yet", "1 []"]


def test_each_role_takes_its_own_resources_besides_its_cores() -> None:
    prefill = WorkerRoleConfig(resources={"prefill": 1.0})
    found = deployments_of(Config(workers=WorkersConfig(prefill=prefill, cores_per_worker=2)))
    options = {role: one.ray_actor_options for role, one in found.items()}
    assert options[Role.PREFILL]["resources"] == {"prefill": 1.0}
    assert options[Role.DECODE].get("resources", {}) == {}
    assert {one["num_cpus"] for one in options.values()} == {2}


def test_workers_of_both_roles_have_as_many_ranks_and_cores_for_each() -> None:
    config = Config(workers=WorkersConfig(cores_per_worker=3, tensor_parallel_size=2))
    for one in deployments_of(config).values():
        (settings,) = one.init_args
        assert settings.engine.tensor_parallel_size == 2
        assert settings.cores == one.ray_actor_options["num_cpus"] == 6
    expected = _client(BuildArguments(config=resolved(config), model_path="/m", secret_file="/s"))
    assert expected.expected_namespace["tensor_parallel_size"] == "2"


def test_the_ingress_knows_how_tenants_are_named() -> None:
    tenants = TenantsConfig(header="X-Who", keys_file=Path("/k"))
    for config, told in ((Config(tenants=tenants), ("X-Who", "/k")), (Config(), ("", ""))):
        args = BuildArguments(config=resolved(config), model_path="/m", secret_file="/s")
        (settings, *_) = build(args)._bound_deployment.init_args
        assert (settings.tenant_header, settings.tenant_keys_file) == told


def test_the_ingress_knows_where_the_keys_are_and_whether_they_must_be_there(
    tmp_path: Path,
) -> None:
    named = KeysConfig(file=Path("keys/k.json"), reload_s=0.5)
    state = StateConfig(dir=tmp_path)
    for config, told in (
        (Config(keys=named), KeySettings(str(Path.cwd() / "keys/k.json"), True, 0.5)),  # noqa: FBT003
        (Config(state=state), KeySettings(str(tmp_path / "keys.json"), False, 1.0)),  # noqa: FBT003
    ):
        args = BuildArguments(config=resolved(config), model_path="/m", secret_file="/s")
        (settings, *_) = build(args)._bound_deployment.init_args
        assert settings.keys == told


def test_workers_and_agents_listen_where_the_links_do_and_share_the_secrets_file() -> None:
    links = LinksConfig(host="0.0.0.0", advertised_host="outside.example")
    for config, told in (
        (Config(links=links), ListenSettings("0.0.0.0", "outside.example")),
        (Config(), ListenSettings("", "")),
    ):
        for one in deployments_of(config).values():
            (settings,) = one.init_args
            assert settings.links == settings.agent.links == told
            assert settings.agent.secret_file == settings.secret_file == "/s"
            assert settings.engine.connector_extra["secret_file"] == "/s"


def test_what_bounds_pulls_is_the_configurations() -> None:
    config = Config(slab=SlabConfig(pull_timeout_s=1.5, pull_streams=3, prefetches_max=0))
    for one in deployments_of(config).values():
        (settings,) = one.init_args
        extra = settings.engine.connector_extra
        taken = ConnectorConfig.from_extra(
            {**extra, "agent_socket": "/a", "owner": "w", "role": "decode", "model": "m"}
        )
        assert (taken.pull_timeout_s, taken.pull_streams, taken.prefetches_max) == (1.5, 3, 0)
