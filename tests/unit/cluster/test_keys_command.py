"""`headwater keys`: made, shown once, listed, revoked; and what stands in its way."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from cluster import cli
from cluster.key_store import KeyStore
from deployments.edge.key_file import KeyFile, KeySettings
from deployments.edge.keys import KeyLimits, KeyScope, digest_of


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keys.json"


def keys(path: Path, *words: str) -> int:
    return cli.main(["keys", *words, "--state-dir", str(path.parent)])


def made(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The key that was made: all that stdout holds."""
    assert keys(path, "add", *words) == 0
    (key,) = capsys.readouterr().out.splitlines()
    return key


def refusal(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert keys(path, *words) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    return line


def opened_by(path: Path, key: str) -> str | None:
    table = KeyFile(KeySettings(str(path), required=True)).table
    assert table is not None
    found = table.find(key.encode())
    return None if found is None else found.name


def test_a_key_that_was_made_opens_until_it_is_revoked(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ann, ben = made(path, capsys, "ann"), made(path, capsys, "ben")
    assert (opened_by(path, ann), opened_by(path, ben)) == ("ann", "ben")
    assert keys(path, "revoke", "ann") == 0
    assert (opened_by(path, ann), opened_by(path, ben)) == (None, "ben")
    assert keys(path, "revoke", "ben") == 0
    assert "stays closed" in capsys.readouterr().err
    assert opened_by(path, ben) is None


def test_a_key_is_shown_once_and_kept_nowhere(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = made(path, capsys, "ann")
    keys(path, "list")
    keys(path, "list", "--json")
    shown = capsys.readouterr()
    kept = b"".join(one.read_bytes() for one in path.parent.iterdir())
    for secret in (key, digest_of(key.encode()).hex()):
        assert secret not in shown.out + shown.err
    assert key.encode() not in kept


def test_the_file_is_its_owner_s_alone_and_the_first_key_says_that_it_closes(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(path, "add", "ann") == 0
    assert "closed from now on" in capsys.readouterr().err
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys(path, "add", "ben") == 0
    assert "closed from now on" not in capsys.readouterr().err


def test_a_file_that_a_group_may_read_stays_so_and_a_link_stays_a_link(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(path, capsys, "ann")
    path.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert keys(path, "add", "ben", "--file", str(link)) == 0
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert [one.name for one in KeyStore(path).entries()] == ["ann", "ben"]


def test_what_a_key_may_do_is_as_it_was_asked(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ("--requests-per-min", "60", "--tokens-per-min", "9000", "--concurrent", "4")
    made(path, capsys, "ann", "--tenant", "team", *limits)
    operator = made(path, capsys, "boss", "--operator")
    assert operator.startswith("hw-op-")
    ann, boss = KeyStore(path).entries()
    assert (ann.tenant, ann.scope) == ("team", KeyScope.API)
    assert ann.limits == KeyLimits(requests_per_min=60, tokens_per_min=9000, concurrent=4)
    assert (boss.tenant, boss.scope, boss.limits) == ("boss", KeyScope.OPERATOR, KeyLimits())
    keys(path, "list")
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "SCOPE", "TENANT", "CREATED", "LIMITS"]
    assert first.endswith("60 requests/min, 9000 tokens/min, 4 concurrent")
    assert second.endswith("none")
    keys(path, "list", "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == str(path)
    assert told["keys"][0]["tokens_per_min"] == 9000
    assert told["keys"][1]["scope"] == "operator"


def test_a_file_that_the_configuration_names_is_the_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "elsewhere" / "k.json"
    assert cli.main(["keys", "add", "ann", "--set", f"keys.file={there}"]) == 0
    assert [one.name for one in KeyStore(there).entries()] == ["ann"]
    capsys.readouterr()


def test_an_empty_list_says_how_to_make_a_key(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(path, "list") == 0
    assert "./headwater keys add NAME" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("add",), "keys add needs the key's name"),
        (("revoke",), "keys revoke needs the key's name"),
        (("list", "ann"), "takes no name"),
        (("add", "a b"), "cannot be a name"),
        (("add", "a\nb"), "cannot be a name"),
        (("add", ".."), "cannot be a name"),
        (("add", "x" * 65), "cannot be a name"),
        (("add", "ann", "--tenant", "a/b"), "cannot be a tenant"),
        (("add", "local"), "the cluster's own"),
        (("add", "ann", "--tenant", "local"), "the cluster's own"),
        (("revoke", "ben"), "there are: none"),
    ],
)
def test_what_cannot_be_is_one_line(
    words: tuple[str, ...], told: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(path, capsys, *words)
    assert line.startswith("headwater: ")
    assert told in line
    assert not path.exists()


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_a_limit_that_is_none_is_refused(
    value: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        keys(path, "add", "ann", "--concurrent", value)
    assert "--concurrent" in capsys.readouterr().err


def test_a_name_that_is_taken_is_refused_and_its_key_stays(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = made(path, capsys, "ann")
    assert "revoke it first" in refusal(path, capsys, "add", "ann")
    assert opened_by(path, key) == "ann"


@pytest.mark.parametrize("action", ["add", "revoke", "list"])
def test_a_broken_file_is_never_written_over(
    action: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.parent.mkdir()
    path.write_text('{"version": 1, "keys": [{"name": "ann"}]}')
    before = path.read_bytes()
    words = (action,) if action == "list" else (action, "ann")
    assert "mend it" in refusal(path, capsys, *words)
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "keys.json"
    assert cli.main(["keys", "add", "ann", "--file", str(path)]) == 1
    assert "cannot write beside" in capsys.readouterr().err


def _add(path: str, name: str) -> None:
    KeyStore(Path(path)).add(name, name, KeyScope.API, KeyLimits())


def test_keys_that_are_made_at_once_are_all_there(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    names = [f"key-{number}" for number in range(4)]
    makers = [context.Process(target=_add, args=(str(path), name)) for name in names]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
        assert maker.exitcode == 0
    assert sorted(one.name for one in KeyStore(path).entries()) == names
    assert {one.name for one in path.parent.iterdir()} == {"keys.json", "keys.json.lock"}


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = made(path, capsys, "ann")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in refusal(path, capsys, "add", "ben")
    assert opened_by(path, key) == "ann"
    assert {one.name for one in path.parent.iterdir()} == {"keys.json", "keys.json.lock"}
