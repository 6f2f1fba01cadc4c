"""What the scheduler's and the worker's connector of one engine share in their process.

vLLM 0.32 builds two connectors (v1/core/sched/scheduler.py and distributed/kv_transfer/
kv_transfer_state.py); with one rank and the uni executor both live in the engine's process. They
find each other by the engine's id. Called by block_connector.py only.
"""

from __future__ import annotations

import os
import threading

from kvcache.connector.config import ConnectorConfig
from kvcache.connector.faults import LoadFaults
from kvcache.connector.loader import BlockLoader
from kvcache.connector.stats import ConnectorStats, Counters
from kvcache.identity import Layout, Namespace
from kvcache.store import BlockStore, Registration

_sessions: dict[str, ConnectorSession] = {}
_sessions_lock = threading.Lock()


class ConnectorSession:
    """One BlockStore, one set of counters, one load thread for an engine.

    The store exists only after `attach` (the layout is known when vLLM registers its caches, before
    the scheduler is built) and is usable only while the agent is there.
    """

    def __init__(self, engine_id: str, config: ConnectorConfig) -> None:
        self.engine_id = engine_id
        self.config = config
        self.counters = Counters()
        self.faults = LoadFaults(config.fail_blocks, hold_loads=config.hold_loads)
        self.namespace: Namespace | None = None
        self.layout: Layout | None = None
        self.loader: BlockLoader | None = None
        self._store: BlockStore | None = None
        self._users = 0

    @classmethod
    def join(cls, engine_id: str, config: ConnectorConfig) -> ConnectorSession:
        """The engine's session, made by whichever role comes first. Pair it with `leave`."""
        with _sessions_lock:
            session = _sessions.get(engine_id)
            if session is None:
                session = _sessions[engine_id] = cls(engine_id, config)
            assert session.config == config
            session._users += 1
            return session

    def leave(self) -> None:
        """The last role to leave closes the store, which ends all that this worker owns."""
        with _sessions_lock:
            self._users -= 1
            if self._users > 0:
                return
            _sessions.pop(self.engine_id, None)
        if self.loader is not None:
            self.loader.close()
        if self._store is not None:
            self._store.close()

    def attach(self, namespace: Namespace, layout: Layout) -> None:
        """Register with the agent. An absent one is no error: everything is a miss until it comes.

        Raises RegistrationRefused, naming the fields, where the agent holds other blocks.
        """
        assert self._store is None, "attached twice"
        self.namespace, self.layout = namespace, layout
        config = self.config
        self._store = BlockStore.connect(
            config.agent_socket,
            Registration(config.owner, config.role, os.getpid(), namespace, layout),
            config.connect_timeout_s,
            required=False,
        )

    def store(self) -> BlockStore | None:
        """The store while it can be used, else None. Any thread."""
        store = self._store
        return store if store is not None and store.connected else None

    def stats(self) -> ConnectorStats:
        """Totals of both roles. Any thread."""
        config = self.config
        loads = self.loader.in_progress if self.loader is not None else 0
        return self.counters.snapshot(
            config.model, config.owner, degraded=self.store() is None, loads_in_progress=loads
        )
