"""The invariants, checked while a run goes on and when it has come to rest.

After each event: the flow and the load book of the ingress that it touched; after every
VALIDATE_EVERY-th and at the end: validate() of all cores. The slots are watched by oracle.py after
each request to an agent, the streams by clients.py at each output. look() looks every 0.15 s for
work that nobody wants any more, and for replicas that call themselves exact and are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deployments.flow.flow_types import Stage
from deployments.ingress.worker_news import TICK_S
from kvcache.blocks import BlockRef, Grant
from kvcache.directory import DirectoryCore
from kvcache.directory_types import Freshness
from kvcache.errors import CorruptBlock
from kvcache.events import engine_source, slab_source
from tests.simulation.clients import Wrong
from tests.simulation.oracle import Account
from tests.simulation.scenario import MODEL
from tests.simulation.sim_agent import SimAgent
from tests.simulation.sim_ingress import LIMITS, ROUTING, SimIngress
from tests.simulation.sim_store import StoreWatch

if TYPE_CHECKING:
    from tests.simulation.world import World

VALIDATE_EVERY = 120
LOOK_S = 0.15
UNWANTED_S = 0.4  # an attempt that its ingress has given up must end within this time


class Watch(StoreWatch):
    """Of one run. Raises Wrong, or AssertionError from validate()."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._unwanted_s: dict[tuple[str, str], float] = {}
        self._late_s: dict[tuple[str, str], float] = {}  # parked beyond their time since

    # ---- StoreWatch: I1, I2 ---------------------------------------------------------------------

    def wrote(self, incarnation: str, owner: str, grant: Grant) -> None:
        """The slot must be the writer's when it has written."""
        agent = self._agent_of(incarnation)
        for arena in agent._arenas.values() if agent else ():
            row = arena.table._rows[grant.slot]
            is_his = row.owner is not None and row.owner.name == owner
            if not is_his or row.generation != grant.generation:
                raise Wrong(f"I2: {owner} wrote into slot {grant.slot}, which is now {row}")

    def unreadable(self, incarnation: str, ref: BlockRef, error: Exception) -> None:
        """Corrupt needs a bit flip, stale a lease that has ended."""
        agent = self._agent_of(incarnation)
        if isinstance(error, CorruptBlock):
            if (incarnation, ref.slot, ref.generation) not in self._world.faults.flipped:
                raise Wrong(f"I2: slot {ref.slot} changed under its reader: {error}")
            return
        account = self._account(agent) if agent else None
        if account is not None and agent is not None:
            now_s = agent.process.clock()
            if account.is_promised(ref.slot, ref.generation, now_s):
                raise Wrong(f"I2: slot {ref.slot} went stale while it was leased: {error}")

    def _agent_of(self, incarnation: str) -> SimAgent | None:
        agents = self._world.agents.values()
        return next((agent for agent in agents if agent.incarnation == incarnation), None)

    def _account(self, agent: SimAgent) -> Account | None:
        arena = agent._arenas.get(MODEL)
        return None if arena is None else self._world.listening.of(arena)

    # ---- after each event: I4, I7, I9 -----------------------------------------------------------

    def after_event(self) -> None:
        """Look at what has changed."""
        for ingress in self._world.ingresses:
            if ingress.is_changed and ingress.process.alive:
                ingress.is_changed = False
                self._flow(ingress)
        if self._world.time.events_total % VALIDATE_EVERY == 0:
            self.validate()

    def _flow(self, ingress: SimIngress) -> None:
        flow = ingress.flow
        flow.validate()
        here: dict[str, int] = {}
        planned: dict[str, int] = {}
        parked = 0
        for request in flow._requests.values():
            parked += request.stage is Stage.PARKED and not request.tokens
            if request.attempt is not None:
                here[request.attempt.worker] = here.get(request.attempt.worker, 0) + 1
                if request.handoff is not None and request.attempt.role == "prefill":
                    planned[request.decode_worker] = planned.get(request.decode_worker, 0) + 1
        if parked > LIMITS.parked_max:
            raise Wrong(f"I9: {parked} new requests are parked in {ingress.name}")
        for worker, books in ingress.router._loads._books.items():
            # A planned worker that was lost and is back has none of its bookings.
            least = here.get(worker, 0)
            if not least <= len(books.flights) <= least + planned.get(worker, 0):
                raise Wrong(
                    f"I7: {ingress.name} has {len(books.flights)} in flight at {worker} in its "
                    f"books, {least} in its flow"
                )

    def validate(self) -> None:
        """All cores against themselves."""
        world = self._world
        for ingress in world.ingresses:
            if ingress.process.alive:
                ingress.router.validate()
                ingress.admission.validate()
                if ingress.router.index.blocks(MODEL) > ROUTING.index_blocks_max:
                    raise Wrong("I9: the index has outgrown its bound")
        for agent in world.agents.values():
            agent.validate()
        if world.directory is not None:
            world.directory.core.validate()

    def look(self) -> None:
        """An attempt that no ingress wants must not go on; a request must not wait for ever."""
        world = self._world
        now_s = world.time.now_s
        world.god.at(LOOK_S, "look", self.look)
        wanted = {
            (ingress.name, attempt)
            for ingress in world.ingresses
            if ingress.process.alive
            for attempt in ingress.flow._by_attempt
        }
        for ingress in world.ingresses:
            if ingress.process.alive and not ingress.process.paused:
                self._parked(ingress)
                self._exact(ingress.name, ingress.router.index._core)
        if world.directory is not None:
            self._exact("the directory", world.directory.core)
        seen: dict[tuple[str, str], float] = {}
        for worker in world.workers:
            if not worker.process.alive or worker.process.paused or worker.process.waits:
                continue
            for attempt, known in worker.loop._attempts.items():
                owner = next((i for i in world.ingresses if i.name == known.owner), None)
                is_cut_off = owner is not None and (
                    owner.process.paused
                    or now_s < world.network.muted_s(owner.process, worker.process) + UNWANTED_S
                )
                if (known.owner, attempt) in wanted or is_cut_off:
                    continue
                key = (worker.name, attempt)
                seen[key] = self._unwanted_s.get(key, now_s)
                if now_s - seen[key] > UNWANTED_S:
                    raise Wrong(f"I4: {worker.name} goes on with {attempt}, which nobody wants")
        self._unwanted_s = seen

    def _parked(self, ingress: SimIngress) -> None:
        """Whoever waits beyond its time is told so at the next tick."""
        now_s = ingress.process.clock()
        for name, request in ingress.flow._requests.items():
            until_s = request.parked_until_s
            key = (ingress.name, name)
            if request.stage is not Stage.PARKED or until_s is None or now_s <= until_s:
                self._late_s.pop(key, None)
            elif now_s > self._late_s.setdefault(key, now_s) + TICK_S + LOOK_S:
                raise Wrong(f"I4: {name} is parked beyond its time")

    def _exact(self, who: str, core: DirectoryCore) -> None:
        """I6: a stream that calls itself exact holds what its writer held at that very place."""
        for node, agent in self._world.agents.items():
            account = self._account(agent)
            stream = core._streams.get((slab_source(node), MODEL))
            if account is None or stream is None:
                continue
            is_exact = stream.freshness is Freshness.EXACT
            if is_exact and stream.incarnation == agent.incarnation:
                is_right = stream.told == account.held_after[stream.sequence]
                if not self._world.faults.is_excused(stream, is_right=is_right):
                    raise Wrong(f"I6: {who} is not exact on {node} at batch {stream.sequence}")

    # ---- the end: I3, I4, I6, I7 ----------------------------------------------------------------

    def answered(self) -> None:
        """Every request has its one end."""
        world = self._world
        for client in world.clients.all.values():
            if len(client.ends) != 1:
                raise Wrong(f"I4: {client.name} has the ends {client.ends}")
            if world.scenario.is_calm and client.ends[0].startswith("failed"):
                raise Wrong(f"I4: {client.name} {client.ends[0]}, and nothing had happened")
        for ingress in world.ingresses:
            if ingress.process.alive and ingress.flow._requests:
                raise Wrong(f"I4: {ingress.name} still has {list(ingress.flow._requests)}")

    def soon_after(self) -> None:
        """Without a fault, leases are ended by their holders, not by their deadlines."""
        if not self._world.scenario.is_calm:
            return
        for account in self._world.listening.accounts.values():
            expired = account.arena.table.counters.leases_expired_total
            open_now = [lease.key for lease in account.arena.table._leases.all()]
            if expired or open_now:
                raise Wrong(f"I3: calm, but {expired} leases ran out, {open_now} are open")

    def at_rest(self) -> None:
        """The books are at their baseline, and every replica knows the truth."""
        self.validate()
        self._ledgers()
        for ingress in self._world.ingresses:
            if ingress.process.alive:
                self._loads(ingress)
                self._replica(ingress)
                self._alarms(ingress.name, ingress.router.index._core)
        if self._world.directory is not None:
            self._alarms("the directory", self._world.directory.core)

    def _ledgers(self) -> None:
        for agent in self._world.agents.values():
            for model in agent.models():
                for ledger in (agent.ledger(model), agent.scan(model)):
                    rest = ledger.filling + ledger.quarantined + ledger.retired
                    if ledger.leases or ledger.leased_slots or rest:
                        raise Wrong(f"I3: at rest, {agent.process.name} has {ledger}")
        for worker in self._world.workers:
            if not worker.process.alive:
                continue
            engine = worker.engine
            engine.side.validate()
            is_empty = engine.blocks.free_total == engine.blocks.total
            if engine.has_work() or not is_empty or engine.loader.in_progress:
                raise Wrong(f"I3: at rest, the engine of {worker.name} is not empty")
            if not worker.loop.idle or engine.side._requests or engine.side.has_pending():
                raise Wrong(f"I3: at rest, {worker.name} is not idle")
            if any(reason == "internal" for reason, _ in worker._stats().load_failures):
                raise Wrong(f"I1: a load of {worker.name} ended with an unforeseen error")

    def _loads(self, ingress: SimIngress) -> None:
        for load in ingress.router.load_snapshot(ingress.process.clock()):
            if load.own_in_flight or load.own_queued_tokens or load.in_flight:
                raise Wrong(f"I7: at rest, {ingress.name} believes {load}")
        if ingress.admission.in_flight(MODEL):
            raise Wrong(f"I7: at rest, {ingress.name} has admitted requests in flight")
        if ingress.router._no_handoff:
            raise Wrong(f"I7: at rest, no hand-off at {ingress.router._no_handoff}")

    def _alarms(self, who: str, core: DirectoryCore) -> None:
        """I6: a digest that differs says that memory was corrupted, not that something is late."""
        differ = core.counters.digests_differ_total
        faults = self._world.faults
        corrupted = sum(core is known for known in faults.corrupted_cores)
        if core is not self._world.directory.core:
            # A replica can be made from what a corrupted directory holds.
            corrupted += faults.directories_corrupted_total
        if differ > corrupted:
            raise Wrong(f"I6: {who} found {differ} digests different after {corrupted} faults")

    def _replica(self, ingress: SimIngress) -> None:
        """I6: exactly the sources that live, each exact, with exactly its blocks."""
        world = self._world
        truth: dict[str, set[bytes]] = {}
        for node, agent in world.agents.items():
            if MODEL in agent.models():
                truth[slab_source(node)] = set(agent._arenas[MODEL].table.published())
        for worker in world.members.values():
            truth[engine_source(worker.name)] = set(worker.engine.blocks.cached)
        views = {view.source: view for view in ingress.router.index.streams()}
        for source in truth.keys() | views.keys():
            view = views.get(source)
            if source not in truth:
                raise Wrong(f"I6: {ingress.name} believes in {view}, which is gone")
            if view is None:
                raise Wrong(f"I6: {ingress.name} has never heard of {source}")
            known = set(ingress.router.index._core.hashes(source, MODEL))
            wrong = known - truth[source]
            missing = set() if view.forgotten_blocks else truth[source] - known
            if view.freshness is not Freshness.EXACT or wrong or missing:
                raise Wrong(
                    f"I6: {ingress.name} on {source}: {view.freshness}, {len(wrong)} blocks that "
                    f"are not there, {len(missing)} unknown"
                )
        missing_workers = world.members.keys() - ingress.links.keys()
        if missing_workers:
            raise Wrong(f"I6: {ingress.name} has no link to {missing_workers}")
        unused = [name for name in world.members if not ingress.router.is_ready(name)]
        if unused:
            raise Wrong(f"I4: at rest, {ingress.name} gives no work to {unused}")
