"""One run: the cluster that a scenario describes, its faults, its clients, and the end.

Serve's part (membership, replacements) and Ray's (actors that start anew) are played here. After
the last fault everything is made whole again, and the run has a bounded time to come to rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack

from kvcache.directory_types import DirectorySettings
from kvcache.slab import SLOT_ALIGN_BYTES
from tests.simulation.boundary import Boundary
from tests.simulation.clients import Clients
from tests.simulation.faults import Faults
from tests.simulation.network import Calls, Network, SimSocket
from tests.simulation.oracle import Listening
from tests.simulation.scenario import HEAL_S, Asked, Cluster, Scenario
from tests.simulation.sim_agent import ORPHAN_TTL_S, SimAgent, SimDirectory, SimShipper
from tests.simulation.sim_ingress import SimIngress
from tests.simulation.sim_worker import SimWorker
from tests.simulation.transitions import CONNECTOR, LEASE_ENDS, Transitions, Watching
from tests.simulation.virtual_time import Process, VirtualTime
from tests.simulation.watch import Watch

ANSWERS_S = 10.0  # after the last fault every request has its end
REST_S = 2.6  # and then every lease, whatever its holder does
CONNECTOR_SETTINGS = {
    "lease_ttl_s": 0.8,
    "handoff_ttl_s": 2.0,
    "fill_ttl_s": 0.5,
    "lookup_timeout_s": 0.08,
    "lookup_grace_s": 0.002,
    "allocate_timeout_s": 0.03,
    "publish_timeout_s": 0.1,
}

# Where leases may run out, they do so more often.
HURRIED = {"lease_ttl_s": 0.3, "handoff_ttl_s": 1.0}


class World:
    """Everything that lives in one run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.time = VirtualTime()
        self.rng = random.Random(scenario.seed ^ 0x5EED)
        self.network = Network(self.time, self.rng)
        self.calls = Calls(self.network)
        self.transitions = Transitions()
        self.clients = Clients(self.time)
        self.listening = Listening(ORPHAN_TTL_S)
        self.watch = Watch(self)
        self.cluster = Cluster(
            self.rng,
            scenario.engine_blocks,
            scenario.seqs_max,
            scenario.step_tokens_max,
            scenario.queue_max,
            scenario.fill_block_s,
            scenario.load_block_s,
            CONNECTOR_SETTINGS if scenario.is_calm else CONNECTOR_SETTINGS | HURRIED,
        )
        self.god = Process(self.time, "world", 1.0, 0.0)
        self.agents: dict[str, SimAgent] = {}
        self.members: dict[str, SimWorker] = {}
        self.workers: list[SimWorker] = []  # all that ever were
        self.ingresses: list[SimIngress] = []
        self.directory: SimDirectory | None = None
        self.faults = Faults(self)
        self._born = 0

    # ---- processes ------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        """A new one, with a clock of its own."""
        rate = 1.0
        if "skewed_clocks" in self.scenario.kinds:
            rate = self.rng.choice((0.97, 1.0, 1.03))
        return Process(self.time, name, rate, self.rng.uniform(10.0, 1000.0))

    def _name(self, what: str) -> str:
        self._born += 1
        return f"{what}{self._born}"

    def add_agent(self, node: str) -> None:
        """An agent's first or next incarnation."""
        process = self.process(self._name(f"agent-{node}"))
        slab_bytes = self.scenario.slots * SLOT_ALIGN_BYTES
        incarnation = f"i{self.rng.getrandbits(32):08x}"
        agent = SimAgent(process, self.network, node, incarnation, slab_bytes)
        SimShipper(
            agent, self.calls, lambda: self.directory, self.faults.weather, self.faults.late_s
        )
        self.agents[node] = agent

    def add_directory(self) -> None:
        """The directory's first or next life."""
        process = self.process(self._name("directory"))
        settings = DirectorySettings(
            log_updates_max=self.rng.choice((3, 8, 64)), pending_batches_max=8
        )
        self.directory = SimDirectory(process, f"e{self.rng.getrandbits(32):08x}", settings)
        process.on_end.append(lambda: self.calls.actor_died(process))

    def add_worker(self, role: str, node: str) -> None:
        """A replica, known to Serve a moment later."""
        process = self.process(self._name(f"{role}-"))

        def connect(caller: Process) -> SimSocket | None:
            agent = self.agents.get(node)
            return None if agent is None else agent.connect(caller)

        incarnation = f"w{self.rng.getrandbits(32):08x}"
        worker = SimWorker(process, role, node, self.cluster, incarnation, connect, self.watch)
        self.workers.append(worker)
        self.god.at(0.02, "a member more", self._joins, worker)

    def _joins(self, worker: SimWorker) -> None:
        if worker.process.alive and not worker.draining:
            self.members = {**self.members, worker.name: worker}
            self._tell()

    def leaves(self, worker: SimWorker) -> None:
        """Serve has noticed: the worker is gone, or drains. Another one comes."""
        if self.members.get(worker.name) is worker:
            self.members = {k: v for k, v in self.members.items() if v is not worker}
            self._tell()
            again_s = self.scenario.replacement_s
            self.god.at(again_s, "replacement", self.add_worker, worker.role, worker.node)

    def _tell(self) -> None:
        for ingress in self.ingresses:
            delay_s = self.rng.uniform(0.0, 0.1)
            ingress.process.at(delay_s, "members", ingress.members_changed)

    def add_ingress(self) -> None:
        """Another ingress."""
        process = self.process(self._name("ingress-"))
        self.ingresses.append(
            SimIngress(
                process,
                self.network,
                self.calls,
                lambda: self.members,
                lambda: self.directory,
                self.clients,
                self.transitions,
                self._born,
                self.scenario,
            )
        )

    def ingress_of(self, number: int) -> SimIngress | None:
        """The load balancer: any that lives."""
        alive = [ingress for ingress in self.ingresses if ingress.process.alive]
        return alive[number % len(alive)] if alive else None

    # ---- the run --------------------------------------------------------------------------------

    def run(self) -> None:
        """From the first process to the last check. Raises Wrong, or what production raises."""
        with ExitStack() as stack:
            stack.callback(self._close)
            stack.enter_context(Watching(self.transitions))
            stack.enter_context(self.listening)
            stack.enter_context(Boundary(self.time, self.rng))
            self._begin()
            self.time.after_event = self.watch.after_event
            self.god.at(0.2, "look", self.watch.look)
            self.time.run(HEAL_S)
            self.faults.heal()
            self._until(lambda: not self.clients.waiting(), HEAL_S + ANSWERS_S)
            self.watch.answered()
            self.time.run(self.time.now_s + 0.6)
            self.watch.soon_after()
            self.time.run(self.time.now_s + REST_S)
            self.watch.at_rest()
            self._count()

    def _begin(self) -> None:
        scenario = self.scenario
        self.add_directory()
        for node in sorted({node for _, node in scenario.workers}):
            self.add_agent(node)
        for role, node in scenario.workers:
            self.add_worker(role, node)
        for _ in range(scenario.ingresses):
            self.add_ingress()
        for asked in scenario.requests:
            self.god.at(asked.at_s, "client", self._client, asked)
        for fault in scenario.faults:
            self.god.at(fault.at_s, fault.kind, self.faults.strike, fault)

    def _client(self, asked: Asked) -> None:
        ingress = self.ingress_of(asked.ingress)
        if ingress is None or not ingress.process.paused:
            self.clients.come(asked, ingress)
        else:  # it answers when it goes on
            ingress.process.at(0.0, "client", self.clients.come, asked, ingress)

    def _until(self, is_done: Callable[[], bool], by_s: float) -> None:
        while not is_done() and self.time.now_s < by_s:
            self.time.run(self.time.now_s + 0.25)

    def _count(self) -> None:
        for account in self.listening.accounts.values():
            self.transitions.totals("lease", account.arena.table.counters, LEASE_ENDS)
        for worker in self.workers:
            stats = worker._stats()
            self.transitions.totals("connector", stats, CONNECTOR)
            for reason, count in stats.load_failures:
                self.transitions.counts["load failed", reason] += count

    def _close(self) -> None:
        self.time.after_event = lambda: None
        processes = [
            *(agent.process for agent in self.agents.values()),
            *(worker.process for worker in self.workers),
            *(ingress.process for ingress in self.ingresses),
        ]
        for process in processes:
            process.kill()
