"""API keys: what the file of keys holds, and whose a presented key is. Pure.

Keys are made by `headwater keys add` with 256 random bits, so that a plain SHA-256 of one is enough
at rest: there is nothing to guess that a slow hash would make slower. A key that is looked up is
compared in constant time; the look-up itself goes by a digest under a key of this process's own,
whose time tells nothing of the keys in the file.

Called by key_file.py (reads the file), key_gate.py (asks `find`) and cluster/key_store.py (writes
the file). Must not log or hold a key in plain text.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

KEY_BYTES = 32
KEY_CHARACTERS_MAX = 512  # of what a client presents; ours have 46
PREFIXES = {"api": "hw-", "operator": "hw-op-"}
KEYS_MAX = 10_000
FILE_BYTES_MAX = 8 << 20
LIMIT_MAX = 1 << 40
LOCAL_OPERATOR = "local"  # the name of the key that the cluster's secret makes
NAME = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
_KEY_LIKE = re.compile(r"hw-[A-Za-z0-9_-]{8,}")
_NO_DIGEST = bytes(32)

Limit = Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)]


class KeyScope(enum.StrEnum):
    """What a key opens: the API; or that and what operators see (/headwater/*)."""

    API = "api"
    OPERATOR = "operator"


class KeysUnusable(Exception):
    """A file of keys that cannot be used; the message says why, and never repeats a key."""


class KeyLimits(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """What one key may use of each ingress; None: as much as there is."""

    requests_per_min: Limit | None = None
    tokens_per_min: Limit | None = None
    concurrent: Limit | None = None


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One key. sha256: of the key (`digest_of`), as hex. created: RFC 3339, for people."""

    name: Annotated[str, msgspec.Meta(pattern=NAME)]
    tenant: Annotated[str, msgspec.Meta(pattern=NAME)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    created: Annotated[str, msgspec.Meta(max_length=64)] = ""
    scope: KeyScope = KeyScope.API
    limits: KeyLimits = KeyLimits()


class KeyDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    version: Literal[1] = 1
    keys: Annotated[tuple[KeyEntry, ...], msgspec.Meta(max_length=KEYS_MAX)] = ()


class KeyTable:
    """The keys that open something now."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._blind = secrets.token_bytes(32)
        self.entries = tuple(entries)
        self._by_tag = {self._tag(bytes.fromhex(one.sha256)): one for one in self.entries}

    def find(self, key: bytes) -> KeyEntry | None:
        """Whose key this is; None for one that is not in the table."""
        digest = digest_of(key[: KEY_CHARACTERS_MAX + 1])
        entry = self._by_tag.get(self._tag(digest))
        held = _NO_DIGEST if entry is None else bytes.fromhex(entry.sha256)
        is_equal = hmac.compare_digest(held, digest)
        return entry if is_equal and len(key) <= KEY_CHARACTERS_MAX else None

    def _tag(self, digest: bytes) -> bytes:
        return hmac.digest(self._blind, digest, "sha256")


def new_key(scope: KeyScope) -> str:
    """A key that nobody can guess; its prefix lets scanners of leaked secrets find it."""
    return PREFIXES[scope.value] + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(b"headwater api key\0" + key).digest()


def local_operator_key(secret: bytes) -> str:
    """The operator key of whoever can read the cluster's secret, such as the command line here."""
    made = hmac.digest(secret, b"headwater operator key\0", "sha256")
    return PREFIXES["operator"] + made.hex()


def local_operator(secret: bytes) -> KeyEntry:
    """The entry of that key."""
    digest = digest_of(local_operator_key(secret).encode())
    return KeyEntry(
        name=LOCAL_OPERATOR, tenant=LOCAL_OPERATOR, sha256=digest.hex(), scope=KeyScope.OPERATOR
    )


def read_document(content: bytes) -> KeyDocument:
    """The keys of a file's bytes. Raises KeysUnusable."""
    if len(content) > FILE_BYTES_MAX:
        message = f"it has {len(content)} bytes, at most {FILE_BYTES_MAX} are read"
        raise KeysUnusable(message)
    try:
        document = msgspec.json.decode(content, type=KeyDocument)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as odd:
        raise KeysUnusable(_KEY_LIKE.sub("hw-...", str(odd))) from None
    names: set[str] = set()
    digests: set[str] = set()
    for entry in document.keys:
        if entry.name == LOCAL_OPERATOR:
            raise KeysUnusable(f"the name {LOCAL_OPERATOR} is the cluster's own")
        if entry.name in names or entry.sha256 in digests:
            raise KeysUnusable(f"{entry.name} is there twice, or has the key of another name")
        names.add(entry.name)
        digests.add(entry.sha256)
    return document


def write_document(document: KeyDocument) -> bytes:
    """The bytes of a file, for people to read as well."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
