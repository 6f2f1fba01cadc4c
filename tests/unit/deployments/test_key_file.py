"""The file of keys while an ingress runs: replaced, broken, gone, back."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from cluster.key_store import KeyStore
from deployments.edge.key_file import KeyFile, KeySettings
from deployments.edge.keys import KeyLimits, KeyScope, KeyTable, local_operator, local_operator_key
from tests.unit.deployments.key_world import ANN, BEN, SECRET, Clock, entry, everybody, write
from tests.waiting import wait_until_async

OPERATOR = local_operator_key(SECRET).encode()


def keys_of(path: Path, *, required: bool = True) -> KeyFile:
    return KeyFile(
        KeySettings(str(path), required=required, reload_s=0.001),
        (local_operator(SECRET),),
        clock=Clock(),
    )


def opens(keys: KeyFile, key: str) -> bool:
    return keys.table is not None and keys.table.find(key.encode()) is not None


def test_a_replaced_file_counts_from_the_next_look_on(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", (entry("ann", ANN),))
    keys = keys_of(path)
    assert opens(keys, ANN)
    write(tmp_path / "new", (entry("ben", BEN),)).replace(path)
    keys.look()
    assert (opens(keys, ANN), opens(keys, BEN)) == (False, True)
    assert keys.table is not None
    assert keys.table.find(OPERATOR), "who has the cluster's secret is its operator"


def test_a_link_that_is_turned_as_kubernetes_does_is_followed(tmp_path: Path) -> None:
    for version, who in (("v1", entry("ann", ANN)), ("v2", entry("ben", BEN))):
        (tmp_path / version).mkdir()
        write(tmp_path / version / "keys.json", (who,))
    data, path = tmp_path / "..data", tmp_path / "keys.json"
    data.symlink_to("v1")
    path.symlink_to("..data/keys.json")
    keys = keys_of(path)
    assert opens(keys, ANN)
    (tmp_path / "new").symlink_to("v2")
    (tmp_path / "new").replace(data)
    keys.look()
    assert (opens(keys, ANN), opens(keys, BEN)) == (False, True)


def test_the_same_size_and_time_are_no_reason_to_miss_a_change(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", (entry("ann", ANN),))
    stat = path.stat()
    keys = keys_of(path)
    write(path, (entry("ben", BEN),))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    keys.look()
    assert opens(keys, BEN)


def broken_by_words(path: Path) -> None:
    path.write_text('{"version": 1, "keys": [')


def gone(path: Path) -> None:
    path.unlink()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def for_all_to_write(path: Path) -> None:
    path.chmod(0o666)


DAMAGES = [broken_by_words, gone, a_folder, a_pipe, for_all_to_write]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_used_keeps_the_last_good_keys_and_is_told_once(
    damage: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "keys.json", everybody())
    keys = keys_of(path)
    assert callable(damage)
    damage(path)
    caplog.clear()
    with caplog.at_level(logging.INFO, "headwater.keys"):
        for _ in range(3):
            keys.look()
    assert opens(keys, ANN)
    assert str(path) in keys.problem
    assert "stay in force" in keys.problem
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert keys.failures_total == 1


def test_a_file_that_is_mended_counts_again(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", everybody())
    keys = keys_of(path)
    good = path.read_bytes()
    for content, expected in ((b"{", False), (good, True), (b"[", False)):
        path.write_bytes(content)
        keys.look()
        assert (keys.problem == "") is expected
    write(path, (entry("ben", BEN),))
    keys.look()
    assert keys.problem == ""
    assert (opens(keys, ANN), opens(keys, BEN)) == (False, True)


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_ingress_does_not_start_with_a_file_that_cannot_be_used(
    damage: object, tmp_path: Path
) -> None:
    path = write(tmp_path / "keys.json", everybody())
    assert callable(damage)
    damage(path)
    with pytest.raises(RuntimeError, match=r"keys\.file .* mend it"):
        keys_of(path)


def test_without_a_file_all_is_open_until_one_comes_and_never_again(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = keys_of(path, required=False)
    keys.look()
    assert (keys.table, keys.problem) == (None, "")
    write(path, (entry("ann", ANN),))
    keys.look()
    assert opens(keys, ANN)
    path.unlink()
    keys.look()
    assert opens(keys, ANN)
    assert not opens(keys, BEN)
    assert keys.problem


def test_an_ingress_that_starts_after_the_file_has_gone_does_not_open_what_was_closed(
    tmp_path: Path,
) -> None:
    KeyStore(tmp_path / "keys.json").add("ann", "ann", KeyScope.API, KeyLimits())
    (tmp_path / "keys.json").unlink()
    with pytest.raises(RuntimeError, match="No such file"):
        keys_of(tmp_path / "keys.json", required=False)


def test_neither_where_the_file_was_laid_by_other_means_than_our_command(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    running = keys_of(path, required=False)
    assert running.table is None
    write(path, everybody())
    running.look()
    assert opens(running, ANN)
    path.unlink()
    with pytest.raises(RuntimeError, match="cannot be used"):
        keys_of(path, required=False)


def test_a_folder_that_takes_no_note_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "keys.json", everybody())
    (tmp_path / "keys.json.lock").symlink_to(tmp_path / "nowhere" / "lock")
    assert opens(keys_of(path, required=False), ANN)
    assert "set keys.file" in caplog.text


def test_a_first_file_that_is_broken_closes_to_all_but_the_operator(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = keys_of(path, required=False)
    path.write_text("hw-")
    keys.look()
    assert isinstance(keys.table, KeyTable)
    assert keys.table.find(OPERATOR)
    assert not opens(keys, ANN)
    assert "nobody but the operator" in keys.problem


def test_an_empty_list_of_keys_is_closed(tmp_path: Path) -> None:
    keys = keys_of(write(tmp_path / "keys.json", ()))
    assert keys.table is not None
    assert not opens(keys, ANN)


async def test_the_file_is_followed_while_the_loop_runs(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", (entry("ann", ANN),))
    keys = keys_of(path)

    async def is_ben_in() -> bool:
        return opens(keys, BEN)

    async def is_told() -> bool:
        return bool(keys.problem)

    following = asyncio.create_task(keys.follow())
    try:
        write(tmp_path / "new", (entry("ben", BEN),)).replace(path)
        await wait_until_async(is_ben_in, timeout_s=10, what="the new keys")
        path.unlink()
        await wait_until_async(is_told, timeout_s=10, what="the problem to be told")
    finally:
        following.cancel()
    assert opens(keys, BEN)
