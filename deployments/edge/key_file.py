"""The file of API keys, read again while an ingress runs.

Polled by content, without inotify: what replaces the file at once (a rename, a Kubernetes volume's
link) and what writes into it look the same. A file that cannot be used keeps the last good keys and
is told in the log, in a metric and in the status. Called by ingress.py. Must not open what was
closed: a file that goes away, or breaks, never lets anybody in, also not into an ingress that
starts then. A serve command that starts without the file opens the endpoint again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from deployments.edge.keys import (
    FILE_BYTES_MAX,
    KeyDocument,
    KeyEntry,
    KeysUnusable,
    KeyTable,
    read_document,
)

log = logging.getLogger("headwater.keys")


@dataclass(frozen=True, slots=True)
class KeySettings:
    """Where the keys are; travels through Ray as plain values.

    required: the file must be there when an ingress starts; else, without a file, nothing is asked.
    """

    file: str = ""
    required: bool = False
    reload_s: float = 1.0


def lock_beside(path: str | Path) -> Path:
    """What `./headwater keys` locks. It stays, and so tells that there were keys."""
    return Path(f"{path}.lock")


def had_keys(path: str | Path) -> bool:
    """Whether a file of keys that is not there has been there."""
    return lock_beside(path).exists()


class KeyFile:
    """The keys of one ingress. ``table`` None: no keys are set, and everything is open."""

    def __init__(
        self,
        settings: KeySettings,
        always: Iterable[KeyEntry] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[KeyTable], None] = lambda _: None,
    ) -> None:
        """Read the file. Raises RuntimeError that says what to do when it is not usable.

        always: keys that count besides the file's, once there is one.
        """
        self._settings = settings
        self._always = tuple(always)
        self._clock = clock
        self._on_change = on_change
        self._content: bytes | None = None
        self.table: KeyTable | None = None
        self.problem = ""  # why the file as it is does not count
        self.loaded_s: float | None = None
        self.failures_total = 0
        self.look()
        if self.problem:
            raise RuntimeError(self.problem)

    def look(self) -> None:
        """Read the file once, and take what it says if it is usable."""
        try:
            content = self._read()
        except (OSError, KeysUnusable) as unusable:
            self._fail(unusable)
        else:
            self._take(content)

    async def follow(self) -> None:
        """Look again for ever."""
        while True:
            await asyncio.sleep(self._settings.reload_s)
            try:
                content = await asyncio.to_thread(self._read)
            except (OSError, KeysUnusable) as unusable:
                self._fail(unusable)
            else:
                self._take(content)

    def _take(self, content: bytes | None) -> None:
        if content is None:
            return
        if content == self._content and self.table is not None:
            if self.problem:
                self.problem = ""
                log.info("the API keys of %s are usable again", self._settings.file)
            return
        try:
            document = read_document(content)
        except KeysUnusable as unusable:
            self._fail(unusable)
            return
        if self._content is None and not self._settings.required:
            self._remember()
        self._content = content
        self._set(document)

    def _set(self, document: KeyDocument) -> None:
        self.table = KeyTable((*document.keys, *self._always))
        self.problem = ""
        self.loaded_s = self._clock()
        log.info("%d API keys read from %s", len(document.keys), self._settings.file)
        self._on_change(self.table)

    def _remember(self) -> None:
        """A file that was laid here by other means than `./headwater keys` closes for good too."""
        try:
            lock_beside(self._settings.file).touch(mode=0o600)
        except OSError as error:
            if had_keys(self._settings.file):
                return
            log.warning(
                "cannot write beside %s (%s): an ingress that starts without it is open; set "
                "keys.file, which must be there",
                self._settings.file,
                error.strerror,
            )

    def _fail(self, unusable: Exception) -> None:
        said = getattr(unusable, "strerror", None) or str(unusable)
        kept = "nobody but the operator of this machine is let in"
        if self._content is not None:
            kept = "the keys that were read last stay in force"
        elif self.table is None:
            self.table = KeyTable(self._always)
            self._on_change(self.table)
        problem = f"keys.file {self._settings.file} cannot be used ({said}): mend it; {kept}"
        if problem != self.problem:  # once, not each second
            self.failures_total += 1
            log.error("%s", problem)
        self.problem = problem

    def _read(self) -> bytes | None:
        """The file's content; None where there may be none, and was none. Raises OSError."""
        path = self._settings.file
        if not path:
            return None
        try:
            # Not a file's only: a pipe in its place must not hold us up.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            if self.table is None and not self._settings.required and not had_keys(path):
                return None
            raise
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise KeysUnusable("it is no file")
            if mode & stat.S_IWOTH:
                raise KeysUnusable("everybody on this machine may write to it: chmod o-w")
            return file.read(FILE_BYTES_MAX + 1)
