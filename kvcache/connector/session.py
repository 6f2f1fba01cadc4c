"""What the scheduler's and the worker's connector of one engine share in their process.

vLLM 0.32 builds two connectors (v1/core/sched/scheduler.py and distributed/kv_transfer/
kv_transfer_state.py); with one rank and the uni executor both live in the engine's process. They
find each other by the engine's id. With several ranks each process has a session of its own. Called
by block_connector.py and ranked_connector.py only.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from kvcache.connector.config import ConnectorConfig
from kvcache.connector.copies import BlockCopies
from kvcache.connector.faults import LoadFaults, StoreFaults
from kvcache.connector.loader import BlockLoader
from kvcache.connector.peers import Peers
from kvcache.connector.prefetch import Prefetches
from kvcache.connector.rank_books import RankBooks
from kvcache.connector.records import LoadJob
from kvcache.connector.stats import ConnectorStats, Counters
from kvcache.identity import Layout, Namespace
from kvcache.store import BlockStore, Registration
from kvcache.transport.staging import StagingLedger, StagingPool
from kvcache.transport.tcp import TcpSettings, TcpSource


@dataclass(frozen=True, slots=True)
class ConnectorLedger:
    """What one engine's connector holds: loads on their way, with when they began, and staging.

    Times are the loader's clock's (time.monotonic). staging: of loads, and of what is fetched ahead
    of them; empty where pulls are off.
    """

    loads: tuple[tuple[LoadJob, float], ...]
    staging: tuple[StagingLedger, ...]


_sessions: dict[str, ConnectorSession] = {}
_sessions_lock = threading.Lock()


class ConnectorSession:
    """One BlockStore, one set of counters and of peers, one load thread for an engine.

    The store exists only after `attach` (the layout is known when vLLM registers its caches, before
    the scheduler is built) and is usable only while the agent is there.
    """

    def __init__(self, engine_id: str, config: ConnectorConfig) -> None:
        """Raises ConnectorMisconfigured where the secret's file cannot be used."""
        self.engine_id = engine_id
        self.config = config
        self.counters = Counters()
        self.faults = LoadFaults(config.fail_blocks, hold_loads=config.hold_loads)
        self.store_faults = StoreFaults()
        self.namespace: Namespace | None = None
        self.layout: Layout | None = None
        self.copies: BlockCopies | None = None
        self.loader: BlockLoader | RankBooks | None = None
        self.peers: Peers | None = None
        self.prefetches: Prefetches | None = None
        self._secret = config.read_secret()
        self._staging: StagingPool | None = None
        self._prefetch_staging: StagingPool | None = None
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
        if self.prefetches is not None:
            self.prefetches.close()
        if self.peers is not None:
            self.peers.close()
        if self.copies is not None:
            self.copies.close()
        if self._store is not None:
            self._store.close()

    def attach(self, namespace: Namespace, layout: Layout, writes_for: str | None = None) -> None:
        """Register with the agent. An absent one is no error: everything is a miss until it comes.

        writes_for: the owner that a rank's engine registered under, if this is one of several.
        Raises RegistrationRefused, naming the fields, where the agent holds other blocks.
        """
        assert self._store is None, "attached twice"
        self.namespace, self.layout = namespace, layout
        config = self.config
        registration = Registration(
            config.owner, config.role, os.getpid(), namespace, layout, writes_for
        )
        self._store = BlockStore.connect(
            config.agent_socket, registration, config.connect_timeout_s, required=False
        )
        if self._secret is not None:
            self._attach_peers(self._secret, registration)

    def _attach_peers(self, secret: bytes, registration: Registration) -> None:
        self.peers, self._staging = self._make_peers(secret, registration)
        if self.config.prefetches_max:
            # Connections and staging of their own: no load waits for a prefetch that hangs.
            peers, self._prefetch_staging = self._make_peers(secret, registration)
            self.prefetches = Prefetches(self.config, self.counters, self.store, peers)

    def _make_peers(self, secret: bytes, registration: Registration) -> tuple[Peers, StagingPool]:
        config = self.config
        staging = StagingPool(config.pull_staging_slots, registration.layout.slot_bytes)
        settings = TcpSettings(config.pull_streams, config.pull_window_slots)
        peers = Peers(
            lambda endpoint: TcpSource(endpoint, secret, registration, staging, settings),
            config.peers_max,
        )
        return peers, staging

    def end_handoff(self, handoff: str) -> None:
        """Nobody takes it over, nor its prefetch, if this worker has one. The engine's thread."""
        if self.prefetches is not None:
            self.prefetches.end(handoff)
        store = self.store()
        if store is not None:
            store.end_handoff(handoff)

    def store(self) -> BlockStore | None:
        """The store while it can be used, else None. Any thread."""
        store = self._store
        return store if store is not None and store.connected else None

    def ledger(self) -> ConnectorLedger:
        """For an operator. The engine's thread."""
        loads = self.loader.jobs() if self.loader is not None else ()
        return ConnectorLedger(loads, self._staging_ledgers())

    def _staging_ledgers(self) -> tuple[StagingLedger, ...]:
        pools = (self._staging, self._prefetch_staging)
        return tuple(pool.ledger() for pool in pools if pool is not None)

    def stats(self) -> ConnectorStats:
        """Totals of both roles. Any thread."""
        config = self.config
        loads = self.loader.in_progress if self.loader is not None else 0
        loads += self.prefetches.awaited if self.prefetches is not None else 0
        staging = self._staging_ledgers()
        return self.counters.snapshot(
            config.model,
            config.owner,
            degraded=self.store() is None,
            copies=self.copies.way() if self.copies is not None else "",
            slot_bytes=self.layout.slot_bytes if self.layout is not None else 0,
            loads_in_progress=loads,
            staging_slots=sum(ledger.slots_total for ledger in staging),
            staging_quarantined=sum(ledger.quarantined for ledger in staging),
        )
