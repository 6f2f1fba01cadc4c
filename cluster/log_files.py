"""The log files of workers and ingresses, and what is new in them.

Called by the logs command. Ray keeps a process's stdout and stderr in its session folder under the
process id; Serve keeps a replica's own lines beside them, under the replica's id.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import ClusterError

INGRESS = "ingress"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """A worker or an ingress, as the status names it."""

    name: str
    role: str
    pid: int


def members_of(statuses: Sequence[dict[str, Any]]) -> list[Member]:
    """Those that run. statuses: of each ingress, its answer to /headwater/status."""
    workers = [
        Member(str(worker["id"]), str(worker["role"]), int(worker["pid"]))
        for worker in statuses[0]["workers"]
    ]
    # An ingress is called after its process id: ingress-4711-0a1b2c3d.
    names = [str(status["ingress"]) for status in statuses]
    return [*workers, *(Member(name, INGRESS, int(name.split("-")[1])) for name in names)]


def chosen(members: Sequence[Member], name: str) -> list[Member]:
    """The one of that name, or all of that role. Raises ClusterError, which names the nearest."""
    found = [one for one in members if name in (one.name, one.role)]
    if not found:
        names = [one.name for one in members]
        near = difflib.get_close_matches(name, [*names, *{one.role for one in members}], 1, 0.4)
        hint = f" (did you mean {near[0]}?)" if near else ""
        known = ", ".join(names)
        raise ClusterError(f"no worker or ingress here is called {name}{hint}; there are: {known}")
    return found


def files_of(folder: Path, member: Member) -> list[Path]:
    """Of Ray's log folder; none where the member runs on another node."""
    replica = member.name.rpartition("-")[2]
    return sorted(
        [
            *folder.glob(f"worker-*-{member.pid}.out"),
            *folder.glob(f"worker-*-{member.pid}.err"),
            *folder.glob(f"serve/replica_*_{replica}.log"),
        ]
    )


@dataclass(slots=True)
class Successors:
    """Whose logs are followed: those chosen first, and those that replace them.

    Of a role that is every member. A single member is followed until it has left; then the member
    of its role that came since.
    """

    name: str
    followed: list[Member]
    known: set[str]

    def look(self, members: Sequence[Member]) -> list[Member]:
        """Take the members as they are now; those to follow from now on. Mutates."""
        role = self.followed[-1].role
        present = {one.name for one in members}
        came = [one for one in members if one.role == role and one.name not in self.known]
        if self.name != role and self.followed[-1].name in present:
            self.known |= present
            return []
        new = came if self.name == role else came[:1]
        self.known |= {one.name for one in new}
        self.followed += new
        return new


@dataclass(slots=True)
class Tail:
    """Writes what is new in files, each part below the name of its file."""

    write: Callable[[bytes], object]
    with_names: bool = True
    _read: dict[Path, int] = field(default_factory=dict)
    _last: Path | None = None

    def show(self, paths: Iterable[Path]) -> None:
        """All that has been added since the last call; a file that shrank begins anew. Mutates."""
        for path in paths:
            try:
                self._show(path)
            except FileNotFoundError:
                continue

    def _show(self, path: Path) -> None:
        with path.open("rb") as file:
            size = path.stat().st_size
            read = self._read.get(path, 0)
            file.seek(read if read <= size else 0)
            while data := file.read(CHUNK_BYTES):
                if self.with_names and path != self._last:
                    self.write(f"==> {path} <==\n".encode())
                self._last = path
                self.write(data)
            self._read[path] = file.tell()
