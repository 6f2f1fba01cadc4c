"""`headwater doctor`: its two forms and its exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import cli
from cluster.commands import doctor
from cluster.machine_facts import Facts
from tests.unit.cluster.test_machine_checks import GOOD


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def examine(monkeypatch: pytest.MonkeyPatch, facts: Facts, *flags: str) -> int:
    monkeypatch.setattr(doctor, "gather", lambda _config, imports: facts)
    return cli.main(["doctor", *flags])


def test_a_good_machine_ends_with_code_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert examine(monkeypatch, GOOD) == 0
    assert capsys.readouterr().out.endswith("\n16 ok. ./headwater serve can run.\n")


def test_a_warning_alone_ends_with_code_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert examine(monkeypatch, replace(GOOD, cores=1.0)) == 0
    shown = capsys.readouterr().out
    assert "\nwarning  cores" in shown
    assert "15 ok, 1 warning. ./headwater serve can run." in shown


def test_a_failure_ends_with_code_1_and_stands_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert examine(monkeypatch, replace(GOOD, has_lscpu=False, cores=1.0)) == 1
    shown = capsys.readouterr().out
    assert "\nFAILURE  libraries" in shown
    assert "14 ok, 1 warning, 1 failure. Mend the failures first." in shown


def test_machines_get_json_and_the_same_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert examine(monkeypatch, replace(GOOD, has_lscpu=False), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    levels = {one["check"]: one["level"] for one in found["checks"]}
    assert levels.pop("libraries") == "failure"
    assert set(levels.values()) == {"ok"}
    assert examine(monkeypatch, GOOD, "--json") == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
