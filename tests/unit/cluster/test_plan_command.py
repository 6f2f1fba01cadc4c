"""`headwater plan` at the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from cluster import cli
from tests.unit.cluster import fake_endpoint, status_examples
from tests.unit.loadtests.planner.examples import LLAMA_7B, LLAMA_13B
from tests.unit.loadtests.planner.laws import profile


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


# ---- load ---------------------------------------------------------------------------------------

SLA = ("--ttft-ms", "300", "--tpot-ms", "30", "--concurrent", "100", "--output-tokens", "200")
SLOW_SLA = (
    *("--ttft-ms", "3000", "--tpot-ms", "60", "--rate", "2"),
    *("--input-tokens", "512", "--output-tokens", "64"),
)


@pytest.fixture
def profiled(folder: Path) -> Path:
    (folder / "state").mkdir()
    profile().save(folder / "state" / "profile.json")
    return folder


def test_cards_by_throughput_need_no_profile(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert folder.is_dir()
    assert plan(*SLA, "--card-tokens-per-s", "2000") == 0
    told = capsys.readouterr().out
    assert "3,333 / 2,000 output tokens/s a card = 1.67: 2" in told
    assert "need a profile" in told


def test_an_answer_in_all_may_be_bounded_instead_of_each_token(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert folder.is_dir()
    words = ("--ttft-ms", "1000", "--e2e-ms", "5000", "--output-tokens", "101")
    assert plan(*words, "--rate", "1", "--card-tokens-per-s", "2000") == 0
    assert "100 gaps × 40 ms" in capsys.readouterr().out


def test_workers_are_planned_from_the_profile(
    profiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profiled.is_dir()
    assert plan(*SLOW_SLA) == 0
    told = capsys.readouterr().out
    for part in ("Prefill workers: ", "Decode workers: ", "Binds first", "Played, ", "Confidence"):
        assert part in told
    assert plan(*SLOW_SLA, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["layout"]["prefill"] > 1
    assert found["most_rate_per_s"] >= 2.4 * 0.999


def test_a_load_is_predicted_for_the_asked_layout(
    profiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profiled.is_dir()
    words = ("--rate", "0.4", "--input-tokens", "100", "--output-tokens", "200")
    assert plan(*words, "--prefill-workers", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)["prediction"]
    assert found["layout"] == {"prefill": 2, "decode": 1}
    assert found["bottleneck"] == "decode step"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--ttft-ms", "300", "--rate", "1"), "one of --tpot-ms and --e2e-ms"),
        (("--ttft-ms", "300", "--tpot-ms", "30"), "one of --rate and --concurrent"),
        (("--card-tokens-per-s", "2000"), "needs --ttft-ms"),
        (
            ("--ttft-ms", "900", "--e2e-ms", "500", "--rate", "1"),
            "cannot end before its first token",
        ),
        (("--rate", "1", "--input-tokens", "10", "--cached-tokens", "10"), "must be below"),
        (("--ttft-ms", "1", "--tpot-ms", "60", "--rate", "1"), "no number of workers helps"),
        (("--rate", "1", "--profile", "none.json"), "cannot be read"),
    ],
)
def test_half_a_question_says_what_is_missing(
    profiled: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    assert profiled.is_dir()
    assert plan(*words) == 2
    assert named in capsys.readouterr().err


def test_without_a_profile_it_is_said_how_to_get_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert folder.is_dir()
    assert plan("--rate", "1") == 2
    assert "./headwater profile measures one" in capsys.readouterr().err
    assert plan("--validate") == 2
    assert "./headwater profile measures one" in capsys.readouterr().err


# ---- which model --------------------------------------------------------------------------------


def test_without_a_name_it_is_the_served_model(
    folder: Path, server: fake_endpoint.Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    served = folder / "served"
    served.mkdir()
    config(served, LLAMA_13B)
    card = {"id": "m", "max_model_len": 4096, "root": str(served)}
    server.objects["/v1/models"] = {"data": [card]}
    status_examples.serve(server, folder / "state")
    assert plan("--context", "4096") == 0
    assert "40 layers, 40 heads" in capsys.readouterr().out
    # A named one wins.
    assert plan("--model", str(folder), "--context", "2048") == 0
    assert "32 layers, 32 heads" in capsys.readouterr().out


def test_of_a_hub_model_only_the_config_is_fetched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str, str | None]] = []

    def download(name: str, file: str, *, revision: str | None) -> str:
        asked.append((name, file, revision))
        return str(folder / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert plan("--model", "owner/name", "--context", "2048") == 0
    assert asked == [("owner/name", "config.json", None)]
    assert "32 layers" in capsys.readouterr().out

    def fail(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network\nhere")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    assert plan("--model", "owner/name") == 1
    told = capsys.readouterr().err
    assert "save its config.json" in told and told.count("\n") == 1
