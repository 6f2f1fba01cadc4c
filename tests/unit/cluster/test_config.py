"""The configuration: bounds, sources in order, and errors that name the nearest right key."""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster import config_flags, config_sources
from cluster.config import Config, default_cache_dir, default_state_dir
from cluster.errors import ConfigError
from cluster.kv_room import check_kv_room
from cluster.model_store import BUNDLED_FIGURES, ModelFigures
from deployments.links.frames import REQUEST_BODY_BYTES_MAX
from router.settings import RouterSettings
from tests.fakes.nodes import FAST, SLOW, resolved


def load(
    *words: str, environ: dict[str, str] | None = None, file: Path | None = None
) -> config_sources.Loaded:
    parser = argparse.ArgumentParser()
    config_flags.add_arguments(parser, *config_flags.FLAGS)
    arguments = parser.parse_args([*words, *(["--config", str(file)] if file else [])])
    return config_sources.load(arguments, environ or {})


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "some.yaml"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)


def test_without_any_source_every_value_is_a_default() -> None:
    loaded = load()
    assert loaded.config == Config()
    assert set(loaded.sources.values()) == {"default"}


def test_every_address_is_loopback_by_default() -> None:
    hosts = [key for key, _ in config_sources.leaves() if key.endswith("host")]
    by_node = {"links.host", "links.advertised_host"}  # the node's own in Ray's books
    assert {key for key in hosts if config_sources.value_of(Config(), key) is None} == by_node
    assert len(hosts) == 4
    for key in set(hosts) - by_node:
        address = config_sources.value_of(Config(), key)
        assert ipaddress.ip_address(str(address)).is_loopback


def test_the_default_kv_cache_holds_a_request_of_full_length() -> None:
    for node, token_bytes in ((FAST, 23_040), (SLOW, 46_080)):
        config = resolved(Config(), node)
        assert config.engine.kv_cache_bytes >= config.model.max_model_len * token_bytes


def test_the_router_defaults_are_the_routers_own() -> None:
    own = {item.name: item.default for item in dataclasses.fields(RouterSettings)}
    for name, value in Config().router.model_dump().items():
        assert own[name] == value


def test_each_field_has_a_description_and_each_number_has_bounds() -> None:
    for key, info in config_sources.leaves():
        assert info.description, key
        if info.annotation in {int, float}:
            assert len(info.metadata) == 2, f"{key} needs a lower and an upper bound"


def test_the_configuration_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(ValidationError):
        config.http.port = 1  # type: ignore[misc]


def test_flags_win_over_environment_and_environment_over_file(yaml_file: Path) -> None:
    yaml_file.write_text("http:\n  host: 127.0.0.2\n  port: 1\nslab:\n  mib: 20\n")
    loaded = load(
        "--port=3",
        file=yaml_file,
        environ={"HEADWATER_HTTP__PORT": "2", "HEADWATER_SLAB__MIB": "30"},
    )
    assert (loaded.config.http.host, loaded.config.http.port) == ("127.0.0.2", 3)
    assert loaded.config.slab.mib == 30
    assert loaded.sources["http.host"] == f"{yaml_file}:2"
    assert loaded.sources["http.port"] == "flag --port"
    assert loaded.sources["slab.mib"] == "env HEADWATER_SLAB__MIB"
    assert loaded.sources["slab.lease_ttl_s"] == "default"


def test_set_reaches_any_key() -> None:
    loaded = load("--set", "workers.decode.replicas=3", "--set", "workers.pin_cores=false")
    assert loaded.config.workers.decode.replicas == 3
    assert loaded.config.workers.pin_cores is False
    assert loaded.sources["workers.decode.replicas"] == "flag --set"


def test_the_file_in_the_current_folder_is_read() -> None:
    Path("headwater.yaml").write_text("http: {port: 77}\n")
    loaded = load()
    assert loaded.config.http.port == 77
    assert loaded.sources["http.port"] == "headwater.yaml:1"


def test_a_model_name_of_digits_stays_text() -> None:
    assert load("--served-name", "135").config.model.served == "135"
    assert load(environ={"HEADWATER_MODEL__SERVED_NAME": "135"}).config.model.served == "135"


def test_an_optional_value_can_be_unset_from_text() -> None:
    assert load("--address", "none").config.ray.address is None


def test_the_served_name_is_the_last_part_of_the_model() -> None:
    assert load("--model", "/models/some-model/").config.model.served == "some-model"
    assert load("--model", "owner/other").config.model.served == "other"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("http.prot", "http.port"),
        ("port", "http.port"),
        ("engine.replicas", "workers.prefill.replicas or workers.decode.replicas"),
        ("decode.replicas", "workers.prefill.replicas or workers.decode.replicas"),
        ("slab.size_mib", "slab.mib"),
    ],
)
def test_an_unknown_key_names_the_nearest_right_one(
    key: str, nearest: str, yaml_file: Path
) -> None:
    *sections, name = key.split(".")
    yaml_file.write_text(
        "".join(f"{' ' * at}{section}:\n" for at, section in enumerate(sections))
        + f"{' ' * len(sections)}{name}: 1\n"
    )
    with pytest.raises(ConfigError) as of_flag:
        load("--set", f"{key}=1")
    assert f"did you mean {nearest}?" in str(of_flag.value)
    with pytest.raises(ConfigError, match="unknown key"):
        load(file=yaml_file)


@pytest.mark.parametrize("variable", ["HEADWATER_HTTP__PROT", "HEADWATER_PORT"])
def test_an_unknown_variable_names_the_nearest_right_one(variable: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean HEADWATER_HTTP__PORT\?"):
        load(environ={variable: "1"})


def test_variables_of_the_launcher_are_none_of_the_configurations() -> None:
    load(environ={"HEADWATER_VENV": "/x", "HEADWATER_PYTHON": "/y", "HEADWATER_BUILD": "cpu"})


def test_every_fault_is_reported_with_its_place(yaml_file: Path) -> None:
    yaml_file.write_text("http:\n  port: 70000\nslb:\n  mib: 1\n")
    with pytest.raises(ConfigError) as error:
        load("--kv-mib", "many", file=yaml_file)
    lines = str(error.value).splitlines()
    assert any(line.startswith(f"{yaml_file}:2: http.port:") for line in lines)
    assert any(line.startswith(f"{yaml_file}:3: unknown key slb") for line in lines)
    assert any(line.startswith("flag --kv-mib: engine.kv_cache_mib:") for line in lines)


def test_a_fault_of_two_values_together_names_both_places() -> None:
    with pytest.raises(ConfigError) as error:
        load(
            "--set",
            "engine.max_num_batched_tokens=64",
            environ={"HEADWATER_ENGINE__MAX_NUM_SEQS": "100"},
        )
    assert "env HEADWATER_ENGINE__MAX_NUM_SEQS, flag --set: engine:" in str(error.value)


def test_a_key_given_twice_is_an_error(yaml_file: Path) -> None:
    yaml_file.write_text("http:\n  port: 1\n  port: 2\n")
    with pytest.raises(ConfigError, match=r"http\.port is given twice"):
        load(file=yaml_file)


@pytest.mark.parametrize("text", ["- a\n", "http: 3\n", "just text\n"])
def test_a_file_of_another_shape_is_an_error(text: str, yaml_file: Path) -> None:
    yaml_file.write_text(text)
    with pytest.raises(ConfigError, match="must be a mapping"):
        load(file=yaml_file)


@pytest.mark.parametrize("text", ["http: [\n", "a: !!python/name:os.system\n"])
def test_a_broken_or_hostile_file_is_an_error(text: str, yaml_file: Path) -> None:
    yaml_file.write_text(text)
    with pytest.raises(ConfigError):
        load(file=yaml_file)


def test_a_body_that_no_message_to_a_worker_could_hold_is_refused_with_the_limit() -> None:
    key, most = "limits.request_body_max_bytes", REQUEST_BODY_BYTES_MAX
    assert load("--set", f"{key}={most}").config.limits.request_body_max_bytes == most
    with pytest.raises(ConfigError, match=rf"{key}: .* less than or equal to {most} \(given"):
        load("--set", f"{key}={most + 1}")


def test_a_value_with_a_tag_that_could_run_code_is_an_error(yaml_file: Path) -> None:
    yaml_file.write_text("http:\n  host: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ConfigError):
        load(file=yaml_file)


def test_a_named_file_that_is_absent_is_an_error(yaml_file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(file=yaml_file)


def test_an_empty_file_changes_nothing(yaml_file: Path) -> None:
    yaml_file.write_text("# nothing\n")
    assert load(file=yaml_file).config == Config()


@pytest.mark.parametrize("flag", ["--decode-workers", "--prefill-workers"])
def test_each_role_has_at_least_one_worker(flag: str) -> None:
    with pytest.raises(ConfigError, match="greater than or equal to 1"):
        load(flag, "0")


def test_the_folders_follow_the_xdg_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert (default_state_dir(), default_cache_dir()) == (
        Path("/s/headwater"),
        Path("/c/headwater"),
    )


def test_a_kv_cache_too_small_for_one_request_is_refused_with_what_it_takes() -> None:
    check_kv_room(resolved(Config()), BUNDLED_FIGURES)
    check_kv_room(resolved(Config()), ModelFigures())
    small = resolved(load("--kv-mib", "100").config)
    with pytest.raises(ConfigError, match="takes 181 MiB"):
        check_kv_room(small, BUNDLED_FIGURES)
    exact = resolved(load("--kv-mib", "180").config)  # vLLM keeps a block for itself
    with pytest.raises(ConfigError, match="takes 181 MiB"):
        check_kv_room(exact, BUNDLED_FIGURES)


def test_resources_of_a_role_come_from_file_environment_and_flag(yaml_file: Path) -> None:
    yaml_file.write_text("workers:\n  prefill:\n    resources:\n      big_gpus: 2\n")
    loaded = load(
        "--set",
        "workers.decode.resources={decode: 0.5}",
        environ={"HEADWATER_WORKERS__PREFILL__RESOURCES": "{prefill: 1}"},
        file=yaml_file,
    )
    assert loaded.config.workers.prefill.resources == {"prefill": 1.0}
    assert loaded.config.workers.decode.resources == {"decode": 0.5}
    assert load(file=yaml_file).config.workers.prefill.resources == {"big_gpus": 2.0}
    assert Config().workers.decode.resources == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{CPU: 1}", "'CPU' is not a custom resource"),
        ("{'': 1}", "'' is not a custom resource"),
        ("{big: 0}", "big is 0, must be up to 1, or a whole number"),
        ("{big: -1}", "big is -1, must be"),
        ("{big: 1.5}", "big is 1.5, must be"),
        ("{big: .nan}", "big is nan, must be"),
        ("{big: .inf}", "big is inf, must be"),
        ("{big: many}", "valid number"),
        ("big", "valid dictionary"),
        ("{big", "valid dictionary"),
    ],
)
def test_resources_that_ray_would_not_take_are_refused_with_their_place(
    text: str, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load("--set", f"workers.prefill.resources={text}")
    assert words in str(error.value)
    assert str(error.value).startswith("flag --set: workers.prefill.resources")


def test_a_key_s_tenant_is_written_in_one_place() -> None:
    with pytest.raises(ConfigError) as error:
        load("--set", "keys.file=/k", "--set", "tenants.keys_file=/t")
    assert str(error.value).startswith("flag --set: tenants: keys_file cannot be beside keys.file")
    assert load("--set", "keys.file=/k").config.keys.file == Path("/k")
    assert load("--set", "tenants.keys_file=/t").config.tenants.keys_file == Path("/t")
    with pytest.raises(ConfigError, match=r"keys\.reload_s"):
        load("--set", "keys.reload_s=0")
