"""The faults, carried out: each does to processes, connections and memory what the world does.

A fault never calls production logic; it kills, stops, cuts, delays, loses, doubles, flips bits.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from kvcache.agent_session import SessionState
from kvcache.directory import DirectoryCore
from kvcache.directory_stream import Stream
from kvcache.directory_types import Applied
from kvcache.events import bits_of
from kvcache.slot import SlotState
from router.prefix_index import PrefixIndex
from tests.simulation.scenario import HEAL_S, Fault
from tests.simulation.virtual_time import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")
NOTICED_S = 0.15  # until Serve or Ray has noticed a death


class Faults:
    """Of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.counts: Counter[str] = Counter()
        self.flipped: set[tuple[str, int, int]] = set()  # incarnation, slot, generation
        self.corrupted_cores: list[DirectoryCore] = []
        self.directories_corrupted_total = 0
        self._corrupted: list[Stream] = []  # and not found out yet
        self._told_wrongly: set[str] = set()  # sources, by the directory
        self._paused: list[Process] = []
        self._is_healed = False

    def strike(self, fault: Fault) -> None:
        """Do it, where there is a target."""
        if getattr(self, f"_{fault.kind}")(fault):
            self.counts[fault.kind] += 1

    def heal(self) -> None:
        """The last fault is over: what was stopped goes on, slow ones are quick again."""
        self._is_healed = True
        for process in self._paused:
            if process.alive and process.paused:
                process.go_on()
        self._world.network.slow_until_s.clear()
        for worker in self._world.workers:
            worker.engine.loader.slow_by_s = 0.0  # type: ignore[attr-defined]

    def weather(self, messages: list[Any]) -> list[Any] | None:
        """What becomes of a shipment: None if it is lost."""
        world = self._world
        kinds, rng = world.scenario.kinds, world.rng
        if self._is_healed or not messages:
            return messages
        if "lose_shipments" in kinds and rng.random() < 0.15:
            self.counts["lose_shipments"] += 1
            return None
        if "drop_batches" in kinds and len(messages) > 1 and rng.random() < 0.3:
            self.counts["drop_batches"] += 1  # the journal was full: the oldest are gone
            messages = messages[rng.randrange(1, len(messages)) :]
        if "lose_tails" in kinds and len(messages) > 1 and rng.random() < 0.3:
            self.counts["lose_tails"] += 1
            messages = messages[: rng.randrange(1, len(messages))]
        if "double_batches" in kinds and rng.random() < 0.3:
            self.counts["double_batches"] += 1
            messages = [*messages, *messages[: rng.randrange(1, len(messages) + 1)]]
        if "reorder_batches" in kinds and len(messages) > 1 and rng.random() < 0.5:
            self.counts["reorder_batches"] += 1
            messages = rng.sample(messages, len(messages))
        return messages

    def late_s(self) -> float | None:
        """How long after its time-out a shipment arrives; None: it is in time."""
        world = self._world
        if self._is_healed or "late_shipments" not in world.scenario.kinds:
            return None
        if world.rng.random() > 0.1:
            return None
        self.counts["late_shipments"] += 1
        return world.rng.uniform(0.0, 0.8)

    # ---- processes ------------------------------------------------------------------------------

    def _kill_worker(self, fault: Fault) -> bool:
        worker = self._pick(list(self._world.members.values()), fault)
        if worker is None or not worker.process.alive:
            return False
        worker.process.kill()
        self._world.god.at(NOTICED_S, "death noticed", self._world.leaves, worker)
        return True

    def _drain_worker(self, fault: Fault) -> bool:
        world = self._world
        worker = self._pick(list(world.members.values()), fault)
        if worker is None or not worker.process.alive or worker.process.paused:
            return False
        worker.on_drained = worker.end
        world.leaves(worker)
        worker.process.at(0.05, "drain", worker.drain)
        return True

    def _pause_worker(self, fault: Fault) -> bool:
        """Some at once, some in the middle of a load or of a fill (if there is one soon)."""
        aim = ("now", "loading", "filling")[fault.target % 3]
        self._pause_when(aim, fault, tries=150)
        return False  # counted when it happens

    def _pause_when(self, aim: str, fault: Fault, tries: int) -> None:
        workers = [w for w in self._world.members.values() if w.process.alive]
        if aim == "loading":
            workers = [w for w in workers if w.engine.loader.in_progress]
        elif aim == "filling":
            workers = [w for w in workers if w.is_filling]
        worker = self._pick(workers, fault)
        if worker is not None:
            self.counts["pause_worker"] += self._pause(worker.process, fault)
        elif tries and aim != "now":
            god = self._world.god
            god.at(0.002, "aims", self._pause_when, aim, fault, tries - 1)

    def _kill_agent(self, fault: Fault) -> bool:
        world = self._world
        agent = self._pick(list(world.agents.values()), fault)
        if agent is None or not agent.process.alive:
            return False
        agent.process.kill()
        node = next(node for node, known in world.agents.items() if known is agent)
        del world.agents[node]
        world.god.at(min(fault.for_s, 1.0), "agent starts", world.add_agent, node)
        return True

    def _pause_agent(self, fault: Fault) -> bool:
        agent = self._pick(list(self._world.agents.values()), fault)
        return agent is not None and self._pause(agent.process, fault)

    def _kill_directory(self, fault: Fault) -> bool:
        world = self._world
        if world.directory is None:
            return False
        world.directory.process.kill()
        world.directory = None
        # Some restarts are so quick that nobody has called meanwhile.
        world.god.at(fault.for_s / 4, "directory starts", world.add_directory)
        return True

    def _kill_ingress(self, fault: Fault) -> bool:
        world = self._world
        ingress = self._pick([i for i in world.ingresses if i.process.alive], fault)
        if ingress is None:
            return False
        ingress.process.kill()
        world.clients.ingress_died(ingress)
        world.god.at(0.3, "ingress starts", world.add_ingress)
        return True

    def _pause_ingress(self, fault: Fault) -> bool:
        ingress = self._pick([i for i in self._world.ingresses if i.process.alive], fault)
        return ingress is not None and self._pause(ingress.process, fault)

    def _pause(self, process: Process, fault: Fault) -> bool:
        if not process.alive or process.paused:
            return False
        process.pause()
        self._paused.append(process)
        by_s = min(fault.for_s, HEAL_S - self._world.time.now_s)
        self._world.god.at(by_s, "pause ends", self._go_on, process)
        return True

    def _go_on(self, process: Process) -> None:
        if process.alive and process.paused:
            process.go_on()

    # ---- connections ----------------------------------------------------------------------------

    def _break_link(self, fault: Fault) -> bool:
        ingress = self._pick([i for i in self._world.ingresses if i.process.alive], fault)
        if ingress is None or not ingress.links:
            return False
        name = self._pick(sorted(ingress.links), fault)
        if name is None:
            return False
        link = ingress.links[name]
        ingress.process.at(0.0, "link breaks", link.close, "reset")
        return True

    def _mute_link(self, fault: Fault) -> bool:
        """Nothing gets through, and neither end is told: only silence says so."""
        world = self._world
        ingress = self._pick([i for i in world.ingresses if i.process.alive], fault)
        name = self._pick(sorted(ingress.links), fault) if ingress else None
        if ingress is None or name is None:
            return False
        until_s = min(world.time.now_s + fault.for_s, HEAL_S)
        world.network.muted_until_s[frozenset((ingress.name, name))] = until_s
        return True

    def _condemn_worker(self, fault: Fault) -> bool:
        """The agent drops a connection, as when its worker broke the protocol or did not read.

        One that may be writing just then, if there is one soon.
        """
        self._condemn_when(fault, tries=100)
        return False  # counted when it happens

    def _condemn_when(self, fault: Fault, tries: int) -> None:
        world = self._world
        found = [
            (agent, session)
            for agent in world.agents.values()
            for session in agent._sessions.values()
            if session.state is SessionState.REGISTERED and session.arena is not None
            if tries == 0 or session.arena.table.writes_of(session.number)
        ]
        chosen = self._pick(found, fault)
        if chosen is None:
            if tries:
                world.god.at(0.002, "aims", self._condemn_when, fault, tries - 1)
            return
        agent, session = chosen
        agent.process.at(0.0, "condemned", agent.condemn, session.number)
        self.counts["condemn_worker"] += 1
        for worker in world.members.values():
            if session.owner and worker.name == session.owner.name and fault.target % 2:
                self._pause(worker.process, fault)  # that is why it did not read

    def _slow_agent(self, fault: Fault) -> bool:
        agent = self._pick(list(self._world.agents.values()), fault)
        if agent is None:
            return False
        until_s = self._world.time.now_s + fault.for_s
        self._world.network.slow_until_s[agent.process.name] = until_s
        return True

    def _slow_loads(self, fault: Fault) -> bool:
        worker = self._pick(list(self._world.members.values()), fault)
        if worker is None:
            return False
        worker.engine.loader.slow_by_s = 0.15 if fault.target % 2 else 0.02  # type: ignore[attr-defined]
        return True

    # ---- memory, and threads that wake late -----------------------------------------------------

    def _flip_bits(self, fault: Fault) -> bool:
        """In a published block of some slab."""
        agent = self._pick(list(self._world.agents.values()), fault)
        for arena in agent._arenas.values() if agent else ():
            rows = arena.table._rows
            published = [s for s in range(len(rows)) if rows.is_in(s, SlotState.PUBLISHED)]
            leased = [s for s in published if arena.table._leases.is_pinned(s)]
            slot = self._pick(leased or published, fault)
            if slot is not None and agent is not None:
                arena.slab._mapping.slots[slot][fault.target] ^= 1 << fault.target % 8
                self.flipped.add((agent.incarnation, slot, rows[slot].generation))
                return True
        return False

    def _corrupt_directory(self, fault: Fault) -> bool:
        directory = self._world.directory
        return directory is not None and self._corrupt(directory.core, None, fault)

    def _corrupt_replica(self, fault: Fault) -> bool:
        ingress = self._pick([i for i in self._world.ingresses if i.process.alive], fault)
        if ingress is None:
            return False
        index = ingress.router.index
        return self._corrupt(index._core, index, fault)

    def _corrupt(self, core: DirectoryCore, index: PrefixIndex | None, fault: Fault) -> bool:
        """A set of blocks has one too few, or one that its writer does not have."""
        stream = self._pick([s for s in core._streams.values() if s.is_exact and s.hashes], fault)
        if stream is None:
            return False
        is_full = index is not None and index.blocks(stream.model) >= index._blocks_max
        if fault.target % 2 or is_full:
            name = sorted(stream.hashes)[fault.number % len(stream.hashes)]
            del stream.hashes[name]
            change = Applied(stream.source, stream.model, (), (name,))
            core._blocks -= 1
        else:
            name = blake2b(f"nobody's {fault.number}".encode(), digest_size=32).digest()
            stream.hashes[name] = None
            change = Applied(stream.source, stream.model, (name,), ())
            core._blocks += 1
        stream.digest ^= bits_of(name)
        if index is not None:
            index._index(change)
        self.corrupted_cores.append(core)
        if index is None:
            self.directories_corrupted_total += 1
            self._told_wrongly.add(stream.source)
        self._corrupted.append(stream)
        return True

    def is_excused(self, stream: Stream, *, is_right: bool) -> bool:
        """Whether a stream is right, or was corrupted and not found out since.

        An ingress that comes meanwhile has it from the directory, which tells it too when it finds
        out.
        """
        if is_right:
            self._corrupted = [known for known in self._corrupted if known is not stream]
            return True
        was_told_wrongly = stream.source in self._told_wrongly
        return was_told_wrongly or any(known is stream for known in self._corrupted)

    def _stale_publish(self, fault: Fault) -> bool:
        """A thread of a worker wakes late, and publishes under a right that is its no longer.

        From now on before each fill, when the slot's right is there, but another one.
        """
        worker = self._pick(list(self._world.members.values()), fault)
        if worker is None:
            return False
        worker.store.replays = True
        return True

    @staticmethod
    def _pick(choices: list[T], fault: Fault) -> T | None:
        return choices[fault.target % len(choices)] if choices else None
