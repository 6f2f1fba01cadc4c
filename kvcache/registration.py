"""How a worker, or a reader of another node, introduces itself to an agent.

Made by the connector's session and by tests; sent by store.py and by the transports. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.identity import Layout, Namespace
from kvcache.protocol import PROTOCOL_VERSION, Hello


@dataclass(frozen=True, slots=True)
class Registration:
    """Who a worker is, and what its blocks are. owner is the worker's id.

    writes_for: the owner of the engine that this is a rank of, whose grants it helps to fill.
    """

    owner: str
    role: str
    pid: int
    namespace: Namespace
    layout: Layout
    writes_for: str | None = None

    def hello(self) -> Hello:
        """As the agent wants to hear it."""
        return Hello(
            PROTOCOL_VERSION,
            self.owner,
            self.role,
            self.pid,
            self.namespace,
            self.layout,
            self.writes_for,
        )
