"""A command on a terminal of its own, as a person has it: its screen, and Ctrl-C on its keys."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROWS, COLUMNS = 40, 140
WAIT_S = 60.0
CTRL_C = b"\x03"


@dataclass
class Terminal:
    """The master's end. ``shown``: all that the command has written."""

    process: subprocess.Popen[bytes]
    master: int
    shown: str = ""

    def read_until(self, condition: Callable[[str], bool]) -> None:
        """Read until what was shown satisfies the condition."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition(self.shown):
            assert time.monotonic() < deadline_s, f"shown in {WAIT_S} s: {self.shown[-2000:]!r}"
            assert self._read(), f"ended with {self.process.poll()}: {self.shown[-2000:]!r}"

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def ended(self) -> int:
        """Read to the end; the exit code."""
        deadline_s = time.monotonic() + WAIT_S
        while self._read():
            assert time.monotonic() < deadline_s, f"has not ended: {self.shown[-2000:]!r}"
        return self.process.wait(WAIT_S)

    def _read(self) -> bool:
        """Take what comes within a moment; False at the end."""
        if not select.select([self.master], [], [], 0.5)[0]:
            return True
        try:
            part = os.read(self.master, 65536)
        except OSError:  # Linux's word for a terminal that nobody has open any more
            return False
        self.shown += part.decode(errors="replace")
        return bool(part)


@contextmanager
def terminal(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run a command as the foreground of a new terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))

    def own_the_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it

    given = {**os.environ, **(environment or {}), "TERM": "xterm-256color"}
    for plain in ("NO_COLOR", "COLUMNS", "LINES"):
        given.pop(plain, None)
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=given,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec_fn=own_the_terminal,  # noqa: PLW1509 - there is no other way to give it one
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)
