"""Which connections may still be writing to the slots of one that has ended.

The ranks of an engine write to slots that were granted to the engine. Its own connection may end
first (it was killed; its ranks end a moment later): what it was filling is free only when the last
of them has ended, or a late write would fall into somebody else's block.

Called by the agent's loop only, under its lock. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcache.agent_session import Session


class WriterGroups:
    """Remembers engines that have ended before their ranks: as many as have such ranks."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[int]] = {}  # connections, by the owner that they had

    def __len__(self) -> int:
        return len(self._waiting)

    def ended(self, session: Session, others: Iterable[Session]) -> list[tuple[int, bool]]:
        """A session's socket has ended: connections that are lost, and whether nobody writes more.

        others: the sessions that are left. Mutates.
        """
        assert session.owner is not None
        name = session.writes_for or session.owner.name
        remain = any(other.writes_for == name for other in others)
        if session.writes_for is not None:
            gone = [] if remain else self._waiting.pop(name, [])
            return [(session.number, True), *((number, True) for number in gone)]
        if remain:
            self._waiting.setdefault(name, []).append(session.number)
        return [(session.number, not remain)]
