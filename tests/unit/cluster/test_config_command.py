"""`headwater config`, and how the command line treats errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cluster import cli, config_sources
from cluster.config import Config


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_table_has_each_key_with_value_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--port", "81"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["KEY", "VALUE", "SOURCE"]
    assert len(lines) == 1 + len(list(config_sources.leaves()))
    (port,) = (line for line in lines if line.startswith("http.port "))
    assert port.split(maxsplit=2) == ["http.port", "81", "flag --port"]


def test_json_has_value_source_and_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--json", "--set", "slab.mib=99"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slab.mib"]["value"] == 99
    assert found["slab.mib"]["source"] == "flag --set"
    assert "MiB" in found["slab.mib"]["description"]


@pytest.mark.parametrize(("flags", "dtype"), [("avx512_bf16", "bfloat16"), ("avx2", "float32")])
def test_config_shows_auto_with_what_it_becomes_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str, dtype: str
) -> None:
    monkeypatch.setenv("HEADWATER_CPU_FLAGS", flags)
    assert cli.main(["config"]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("model.dtype")]
    assert line.split() == ["model.dtype", "auto", f"({dtype})", "default"]
    assert cli.main(["config", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["model.dtype"]
    assert (shown["value"], shown["resolved"]) == ("auto", dtype)
    assert cli.main(["config", "--json", "--dtype", "float16"]) == 0
    assert "resolved" not in json.loads(capsys.readouterr().out)["model.dtype"]


def test_config_leaves_auto_to_the_nodes_of_a_running_ray(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["config", "--json", "--address", "10.0.0.1:6379"]) == 0
    shown = json.loads(capsys.readouterr().out)["model.dtype"]
    assert shown["value"] == "auto" and "resolved" not in shown


def test_the_yaml_form_loads_back_to_the_same_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["config", "--yaml", "--served-name", "a: b", "--prefill-workers", "4"]) == 0
    written = tmp_path / "written.yaml"
    written.write_text(capsys.readouterr().out)
    arguments = cli.parse(["config", "--config", str(written)])
    loaded = config_sources.load(arguments, {})
    assert loaded.config.model.served_name == "a: b"
    assert loaded.config.workers.prefill.replicas == 4
    assert set(loaded.sources.values()) == {
        f"{written}:{number}"
        for number, line in enumerate(written.read_text().splitlines(), start=1)
        if line.lstrip().partition(":")[2] and not line.lstrip().startswith("#")
    }
    assert loaded.config.engine == Config().engine


def test_a_fault_ends_with_a_message_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--set", "http.prot=1"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("headwater: flag --set http.prot=1: unknown key")


def test_an_unknown_command_ends_with_code_2() -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["sevre"])
    assert end.value.code == 2


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(re.search(rf"^    {name}\s", shown, re.MULTILINE) for name in cli.COMMANDS)
