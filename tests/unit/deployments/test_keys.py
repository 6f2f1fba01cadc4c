"""The table of API keys: whose a key is, what a file may hold, and what it never shows."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.edge.keys import (
    FILE_BYTES_MAX,
    KEY_CHARACTERS_MAX,
    PREFIXES,
    KeyDocument,
    KeyLimits,
    KeyScope,
    KeysUnusable,
    KeyTable,
    digest_of,
    local_operator,
    local_operator_key,
    new_key,
    read_document,
    write_document,
)
from tests.unit.deployments.key_world import ANN, SECRET, entry, everybody

TABLE = KeyTable(everybody())


def document(**changes: object) -> bytes:
    one = {"name": "ann", "tenant": "ann", "sha256": "0" * 64} | changes
    return json.dumps({"version": 1, "keys": [one]}).encode()


def test_a_key_is_found_by_all_of_it_and_by_nothing_else() -> None:
    found = TABLE.find(ANN.encode())
    assert found is not None
    assert found.name == "ann"
    for wrong in (b"", b" ", ANN[:-1].encode(), ANN.encode() + b"0", ANN.upper().encode()):
        assert TABLE.find(wrong) is None
    assert TABLE.find(digest_of(ANN.encode())) is None, "what the file holds opens nothing"
    assert TABLE.find(digest_of(ANN.encode()).hex().encode()) is None
    assert KeyTable(()).find(ANN.encode()) is None


@given(st.binary(max_size=2 * KEY_CHARACTERS_MAX))
def test_no_other_bytes_are_a_key(key: bytes) -> None:
    known = {one.encode() for one in (ANN,)}
    found = TABLE.find(key)
    assert found is None or key in known


def test_a_key_longer_than_any_is_none_even_where_its_beginning_would_be() -> None:
    long = "k" * KEY_CHARACTERS_MAX
    table = KeyTable((entry("long", long), entry("longer", long + "k")))
    assert table.find(long.encode()) is not None
    assert table.find(long.encode() + b"k") is None
    assert table.find(long.encode() + b"kk") is None


def test_new_keys_have_256_bits_and_tell_what_they_open() -> None:
    keys = {new_key(KeyScope.API) for _ in range(50)}
    assert len(keys) == 50
    for key in keys:
        assert key.startswith(PREFIXES["api"])
        assert len(key) == len(PREFIXES["api"]) + 43  # 256 bits in base64
    assert new_key(KeyScope.OPERATOR).startswith(PREFIXES["operator"])


def test_the_secret_s_own_operator_key_is_one_for_each_secret() -> None:
    table = KeyTable((local_operator(SECRET),))
    found = table.find(local_operator_key(SECRET).encode())
    assert found is not None
    assert found.scope is KeyScope.OPERATOR
    assert table.find(local_operator_key(SECRET + b"x").encode()) is None
    assert SECRET.hex() not in local_operator_key(SECRET)


def test_what_is_written_is_read_again_and_holds_no_key() -> None:
    limits = KeyLimits(requests_per_min=60, concurrent=2)
    entries = everybody(limits)
    content = write_document(KeyDocument(keys=entries))
    assert read_document(content).keys == entries
    assert ANN.encode() not in content
    assert b'"tokens_per_min"' not in content, "a limit that is not set is not there"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"version": 2, "keys": []}',
        b'{"version": 1, "kes": []}',
        document(name=""),
        document(name="ann\n"),
        document(name="../ann"),
        document(name="n" * 65),
        document(name="local"),
        document(sha256="0" * 63),
        document(sha256="0" * 64 + "\n"),
        document(sha256="G" * 64),
        document(scope="root"),
        document(key="in plain text"),
        document(limits={"requests_per_min": 0}),
        document(limits={"requests_per_min": 1.5}),
        document(limits={"requests_per_hour": 1}),
        b" " * (FILE_BYTES_MAX + 1),
    ],
)
def test_a_file_that_is_not_quite_right_is_not_used_at_all(content: bytes) -> None:
    with pytest.raises(KeysUnusable):
        read_document(content)


@pytest.mark.parametrize("pair", [("ann", "k1", "ann", "k2"), ("ann", "k", "ben", "k")])
def test_a_name_or_a_key_that_is_there_twice_is_refused(pair: tuple[str, str, str, str]) -> None:
    twice = KeyDocument(keys=(entry(*pair[:2]), entry(*pair[2:])))
    with pytest.raises(KeysUnusable, match="twice"):
        read_document(write_document(twice))


def test_a_key_that_somebody_wrote_into_the_file_is_not_repeated() -> None:
    key = new_key(KeyScope.API)
    for content in (document(scope=key), document(**{key: 1}), document(name=key + "\n")):
        with pytest.raises(KeysUnusable) as unusable:
            read_document(content)
        assert key not in str(unusable.value)
