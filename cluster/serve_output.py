"""The serve command's output as a file of the state folder, and a serve command in the background.

Called by the serve command; `headwater logs` shows the file. Each start writes it anew, once no
other serve command can be using it.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TextIO

FILE = "headwater.log"
POLL_S = 0.1
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@contextlib.contextmanager
def kept(state_dir: Path) -> Iterator[None]:
    """While the block runs, what is written to sys.stdout goes to the file, too."""
    with (
        (state_dir / FILE).open("w", buffering=1, encoding="utf-8") as file,
        contextlib.redirect_stdout(_Both(sys.stdout, file)),
    ):
        yield


class _Both(io.TextIOBase):
    """A stream that writes to a first one, which is also asked what it is, and to a second one."""

    def __init__(self, first: TextIO, second: TextIO) -> None:
        self._first, self._second = first, second

    def write(self, text: str) -> int:
        self._second.write(text)
        return self._first.write(text)

    def flush(self) -> None:
        self._first.flush()

    def isatty(self) -> bool:
        return self._first.isatty()

    def fileno(self) -> int:
        return self._first.fileno()


def detach(state_dir: Path) -> Callable[[], None]:
    """Go on in a process of its own, whose output is the file. Returns in that process alone.

    The calling process shows the file until the returned function is called or the other process
    ends; then it ends itself, in here: with 0, or with the code of the failure. An interrupt ends
    both.
    """
    reading, writing = os.pipe()  # not inherited by programs that the new process starts
    log = state_dir / FILE
    sys.stdout.flush()
    with log.open("wb") as output, Path(os.devnull).open("rb") as nothing:
        pid = os.fork()
        if pid:
            os.close(writing)
            sys.exit(_watch(pid, reading, log))
        os.close(reading)
        os.setsid()  # a terminal that closes, or its Ctrl-C, does not reach it
        for ours, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(ours.fileno(), number)

    def ready() -> None:
        os.write(writing, b".")
        os.close(writing)

    return ready


def _watch(pid: int, reading: int, log: Path) -> int:
    """Show what the other process says until it is ready or has ended; the exit code."""
    with log.open("rb") as said:
        try:
            while not select.select([reading], [], [], POLL_S)[0]:
                _show(said)
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            _show(said)
            return EXIT_INTERRUPTED
        is_ready = bool(os.read(reading, 1))
        code = 0 if is_ready else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _show(said)
    if is_ready:
        sys.stdout.write(f"\nIt goes on in the background (pid {pid}). Its log is {log}\n")
        return 0
    sys.stderr.write(f"headwater: serve ended before it was ready; its log is {log}\n")
    return code if code > 0 else EXIT_FAILED


def _show(said: IO[bytes]) -> None:
    """What has been added since the last call."""
    sys.stdout.write(said.read().decode(errors="replace"))
    sys.stdout.flush()
