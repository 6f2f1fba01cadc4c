"""The token of a Ray cluster that is started here: made once, and its owner's alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.local_ray import _environment_of_ray
from cluster.ray_token import place_of_token, token_environment


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_token_is_made_where_ray_looks_for_it_and_kept(home: Path, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        assert token_environment({}, tmp_path) == {"RAY_AUTH_MODE": "token"}
    finally:
        os.umask(old)
    path = home / ".ray" / "auth_token"
    token = path.read_text()
    assert len(token) == 64
    assert mode_of(path) == 0o600
    token_environment({}, tmp_path)
    assert path.read_text() == token
    assert [one.name for one in path.parent.iterdir()] == ["auth_token"]


def test_a_token_that_ray_made_for_all_to_read_is_made_its_owner_s(
    home: Path, tmp_path: Path
) -> None:
    path = home / ".ray" / "auth_token"
    path.parent.mkdir(parents=True)
    path.write_text("theirs")
    path.chmod(0o644)
    token_environment({}, tmp_path)
    assert (path.read_text(), mode_of(path)) == ("theirs", 0o600)


def test_an_empty_file_is_no_token(home: Path, tmp_path: Path) -> None:
    path = home / ".ray" / "auth_token"
    path.parent.mkdir(parents=True)
    path.touch()
    token_environment({}, tmp_path)
    assert path.read_text()


def test_without_a_home_it_is_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    made = token_environment({}, tmp_path / "state")
    path = tmp_path / "state" / "ray-token"
    assert made == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    assert mode_of(path) == 0o600
    assert path.read_text() not in str(made)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, {}),
        ({"RAY_AUTH_MODE": "token"}, {}),
        ({"RAY_AUTH_TOKEN": "theirs"}, {"RAY_AUTH_MODE": "token"}),
        ({"RAY_AUTH_TOKEN_PATH": "/theirs"}, {"RAY_AUTH_MODE": "token"}),
    ],
)
def test_what_the_user_has_set_stays(
    environ: dict[str, str], expected: dict[str, str], home: Path, tmp_path: Path
) -> None:
    assert token_environment(environ, tmp_path) == expected
    assert not home.exists()


def test_a_person_is_told_where_the_token_is_and_never_the_token() -> None:
    assert place_of_token({}) is None
    assert place_of_token({"RAY_AUTH_MODE": "disabled"}) is None
    on = {"RAY_AUTH_MODE": "token"}
    assert place_of_token(on) == "~/.ray/auth_token"
    assert place_of_token(on | {"RAY_AUTH_TOKEN_PATH": "/there"}) == "/there"
    told = place_of_token(on | {"RAY_AUTH_TOKEN": "s3cret"})
    assert told is not None
    assert "s3cret" not in told


def test_ray_s_processes_inherit_the_mode_and_no_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_API_KEY", "hw-mine")
    with _environment_of_ray({"RAY_AUTH_MODE": "token"}, alone=True):
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert "HEADWATER_API_KEY" not in os.environ
    assert os.environ["HEADWATER_API_KEY"] == "hw-mine"
    assert os.environ.get("RAY_AUTH_MODE") != "token"
