"""`headwater test`: arguments reach the suite or pytest; system packages are installed or named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import cli
from cluster.commands import test as test_command
from cluster.errors import PrerequisiteError

NEED = test_command.SystemNeed("no-such-program", "no-such-package")


def test_all_arguments_reach_pytest_dashes_included(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: seen.append(words))
    monkeypatch.setattr(os, "chdir", lambda _: None)
    cli.main(["test", "-k", "some", "--help", "tests/unit"])
    assert seen[0][:3] == [sys.executable, "-m", "pytest"]
    assert seen[0][-4:] == ["-k", "some", "--help", "tests/unit"]


@pytest.mark.parametrize("words", [[], ["--all"], ["--reruns", "3"], ["--all", "--reruns=3"]])
def test_arguments_of_the_suite_reach_it(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: seen.append(command))
    monkeypatch.setattr(os, "chdir", lambda _: None)
    cli.main(["test", *words])
    assert seen == [[sys.executable, "-m", "tests.suite", *words]]


def os_release(folder: Path, text: str) -> Path:
    path = folder / "os-release"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "debian"),
    [("ID=debian\n", True), ('ID=mint\nID_LIKE="ubuntu debian"\n', True), ("ID=fedora\n", False)],
)
def test_debian_and_its_kin_are_recognised(text: str, debian: bool, tmp_path: Path) -> None:  # noqa: FBT001
    assert test_command.is_debian(os_release(tmp_path, text)) is debian
    assert not test_command.is_debian(tmp_path / "absent")


def test_root_on_debian_installs_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = apt_get_that(monkeypatch, fails_on="nothing")
    test_command.provide([NEED], ci=True, os_release=os_release(tmp_path, "ID=debian\n"))
    install = ("install", "-y", "-qq", "--no-install-recommends")
    assert commands[-1] == ["apt-get", *install, "no-such-package"]


@pytest.mark.parametrize("step", ["update", "no-such-package"])
def test_a_package_that_cannot_be_had_is_named_and_the_others_are_installed(
    step: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = apt_get_that(monkeypatch, fails_on=step)
    other = test_command.SystemNeed("other-program", "other-package")
    release = os_release(tmp_path, "ID=debian\n")
    test_command.provide([NEED, other], ci=False, os_release=release)
    told = capsys.readouterr().err.partition("the tests need ")[2]
    assert "no-such-program" in told
    assert ("other-program" in told) is (step == "update")
    assert (commands[-1][-1] == "other-package") is (step != "update")
    with pytest.raises(PrerequisiteError, match="no-such-package"):
        test_command.provide([NEED, other], ci=True, os_release=release)


def apt_get_that(monkeypatch: pytest.MonkeyPatch, *, fails_on: str) -> list[list[str]]:
    """The commands that root runs, of which one fails; none is run."""
    commands: list[list[str]] = []

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(words)
        return subprocess.CompletedProcess(words, 100 if fails_on in words else 0)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_elsewhere_what_is_missing_is_named_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = os_release(tmp_path, "ID=fedora\n")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    test_command.provide([NEED], ci=False, os_release=release)
    assert "no-such-program" in capsys.readouterr().err
    with pytest.raises(PrerequisiteError, match="no-such-package"):
        test_command.provide([NEED], ci=True, os_release=release)


def test_nothing_missing_says_and_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    test_command.provide([], ci=True)
    assert capsys.readouterr().err == ""
