"""The file of API keys, as the keys command changes it: made, listed, revoked.

One change at a time (a lock beside the file), and at once: who reads sees the old file or the new
one. The running cluster reads it again by itself (deployments/edge/key_file.py). Called by the keys
command. Must not keep a key: it is given back once, and only its digest is written.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cluster.errors import KeysError
from deployments.edge.key_file import lock_beside
from deployments.edge.keys import (
    KEYS_MAX,
    LOCAL_OPERATOR,
    NAME,
    KeyDocument,
    KeyEntry,
    KeyLimits,
    KeyScope,
    KeysUnusable,
    digest_of,
    new_key,
    read_document,
    write_document,
)

OWNER_ONLY = 0o600
NAME_RULE = "letters, digits, dots, dashes and underscores, 64 at most, a letter or digit first"


class KeyStore:
    """The keys in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> tuple[KeyEntry, ...]:
        """What is there. Raises KeysError; a file that is not there has none."""
        try:
            return read_document(self.path.read_bytes()).keys
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise KeysError(f"cannot read {self.path}: {error.strerror}") from error
        except KeysUnusable as unusable:
            message = f"{self.path} cannot be used ({unusable}): mend it, or begin another file"
            raise KeysError(message) from unusable

    def add(self, name: str, tenant: str, scope: KeyScope, limits: KeyLimits) -> str:
        """Make a key; gives it back, for the one time that it can be seen. Raises KeysError."""
        for what, word in (("name", name), ("tenant", tenant)):
            if not re.search(NAME, word):
                raise KeysError(f"{word!r} cannot be a {what}: {NAME_RULE}")
            if word == LOCAL_OPERATOR:
                raise KeysError(f"the {what} {word} is the cluster's own; choose another")
        with self._alone():
            entries = self.entries()
            if any(entry.name == name for entry in entries):
                message = (
                    f"there is a key named {name} already: revoke it first, or make another with "
                    f"--tenant {name}, which shares its blocks"
                )
                raise KeysError(message)
            if len(entries) >= KEYS_MAX:
                raise KeysError(f"{self.path} has {KEYS_MAX} keys, and may have no more")
            key = new_key(scope)
            entry = KeyEntry(
                name=name,
                tenant=tenant,
                sha256=digest_of(key.encode()).hex(),
                created=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                scope=scope,
                limits=limits,
            )
            self._replace((*entries, entry))
        return key

    def revoke(self, name: str) -> int:
        """Take a key away; gives back how many are left. Raises KeysError."""
        with self._alone():
            entries = self.entries()
            kept = tuple(entry for entry in entries if entry.name != name)
            if len(kept) == len(entries):
                known = ", ".join(entry.name for entry in entries) or "none"
                raise KeysError(f"there is no key named {name} in {self.path}; there are: {known}")
            self._replace(kept)
        return len(kept)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        lock = lock_beside(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
        except OSError as error:
            raise KeysError(f"cannot write beside {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _replace(self, entries: tuple[KeyEntry, ...]) -> None:
        """All at once, and on the disk. A link stays one, as do its owner and readers."""
        path = Path(os.path.realpath(self.path))
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            before = path.stat() if path.exists() else None
            mode = before.st_mode & 0o666 & ~0o022 if before else OWNER_ONLY
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, OWNER_ONLY)
            with os.fdopen(descriptor, "wb") as file:
                made = os.fstat(descriptor)
                if before and (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
                    os.fchown(descriptor, before.st_uid, before.st_gid)  # or else refuse
                os.fchmod(descriptor, mode)
                file.write(write_document(KeyDocument(keys=entries)))
                file.flush()
                os.fsync(descriptor)
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise KeysError(f"cannot write {path}: {error.strerror}") from error
