"""`headwater plan` at the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster import cli
from tests.unit.loadtests.planner.examples import LLAMA_7B, LLAMA_13B


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of which only the config is here; nothing runs."""
    monkeypatch.chdir(tmp_path)
    return config(tmp_path, LLAMA_7B)


def config(folder: Path, found: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(found))
    return folder


def plan(*words: str) -> int:
    return cli.main(["plan", "--state-dir", "state", "--cache-dir", "cache", *words])


def test_a_models_kv_is_planned_step_by_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--dtype", "float16", "--context", "2048", "--device-memory", "80GB")
    assert plan("--model", str(folder), *words, "--concurrent", "200") == 0
    told = capsys.readouterr().out
    assert "1 GiB (1.074 GB)" in told
    assert "6,738,415,616 parameters, counted from the config" in told
    assert "contradict their own formula" in told
    assert "devices" in told


def test_machines_get_the_figures_in_bytes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(folder, LLAMA_13B) / "config.json"
    words = ("--dtype", "float16", "--context", "4096", "--kv-memory", "44GB", "--json")
    assert plan("--model", str(file), *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["token_bytes"] == 819_200
    assert [fit["sequences"] for fit in found["fits"]] == [13]


def test_examples_need_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--examples") == 0
    assert "13 is true in GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--device-memory", "80"), "names no unit"),
        (("--context", "0"), "at least 1"),
        (("--context", "x"), "invalid literal"),
        (("--memory-share", "1.5"), "at most 1"),
    ],
)
def test_a_flag_that_makes_no_sense_is_one_line(
    words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plan(*words)
    told = capsys.readouterr().err
    assert named in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("found", "words", "named"),
    [
        ({**LLAMA_7B, "kv_lora_rank": 512}, (), "MLA"),
        (LLAMA_7B, ("--tp", "3"), "cannot be split"),
        ({**LLAMA_7B, "model_type": "odd"}, ("--device-memory", "80GB"), "--weights SIZE"),
    ],
)
def test_a_model_that_is_not_understood_is_one_line(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    found: dict[str, Any],
    words: tuple[str, ...],
    named: str,
) -> None:
    assert plan("--model", str(config(folder, found)), *words) == 1
    told = capsys.readouterr().err
    assert named in told and told.count("\n") == 1


@pytest.mark.parametrize("name", ["no-such-folder", "./a/b", "SmolLM2-135M-Instruct"])
def test_a_model_that_is_not_here_says_what_to_name(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert folder.is_dir()
    assert plan("--model", name) == 1
    assert "config" in capsys.readouterr().err
