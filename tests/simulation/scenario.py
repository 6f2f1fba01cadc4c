"""What one seed does: the cluster's sizes, its clients, its faults. All drawn before the run.

Each seed enables a random subset of the kinds of fault ("swarm"), so that rare combinations are not
drowned by the usual ones. A scenario can be made smaller (shrink.py): kinds, single faults and
single requests are left out by number.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

MODEL = "m"
FAULTS_S = 1.6  # faults begin before
HEAL_S = 3.6  # and are over by then

PROCESS_FAULTS = (
    "kill_worker",
    "pause_worker",
    "kill_agent",
    "pause_agent",
    "kill_directory",
    "kill_ingress",
    "pause_ingress",
    "break_link",
    "mute_link",
    "condemn_worker",
    "drain_worker",
    "flip_bits",
    "slow_agent",
    "slow_loads",
    "stale_publish",
    "corrupt_directory",
    "corrupt_replica",
)
WEATHER = (
    "lose_shipments",
    "late_shipments",
    "drop_batches",
    "lose_tails",
    "double_batches",
    "reorder_batches",
)
CLIENT_KINDS = ("cancel", "stop_string")
TIGHT = ("tiny_slab", "tiny_engine", "tiny_queue", "skewed_clocks", "one_worker_of_a_role")
KINDS = (*PROCESS_FAULTS, *WEATHER, *CLIENT_KINDS, *TIGHT)

# Without these, every lease is ended by its holder, and every request is finished or cancelled.
DISTURBING = frozenset(PROCESS_FAULTS) - {
    "flip_bits",
    "stale_publish",
    "corrupt_directory",
    "corrupt_replica",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One client: what it asks for and when. cancel_s: it goes away so long after it came."""

    number: int
    at_s: float
    ingress: int
    prompt: tuple[int, ...]
    salt: str
    max_tokens: int
    min_tokens: int
    stop: int | None
    cancel_s: float | None


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: of a kind, at a time, for a while, at the `target`-th of those there are."""

    number: int
    kind: str
    at_s: float
    for_s: float
    target: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """One seed's."""

    seed: int
    kinds: frozenset[str]
    workers: tuple[tuple[str, str], ...]  # (role, node)
    ingresses: int
    slots: int
    engine_blocks: int
    seqs_max: int
    step_tokens_max: int
    queue_max: int
    replacement_s: float
    reconnect_s: float
    attempts_max: int
    fill_block_s: float
    load_block_s: float
    requests: tuple[Asked, ...]
    faults: tuple[Fault, ...]

    @property
    def is_calm(self) -> bool:
        """Nothing disturbs any process or connection."""
        return not any(fault.kind in DISTURBING for fault in self.faults)

    def without(
        self, kinds: frozenset[str], requests: frozenset[int], faults: frozenset[int]
    ) -> Scenario:
        """A smaller one."""
        return replace(
            self,
            kinds=self.kinds - kinds,
            requests=tuple(r for r in self.requests if r.number not in requests),
            faults=tuple(f for f in self.faults if f.number not in faults and f.kind not in kinds),
        )

    def describe(self) -> str:
        """For people."""
        lines = [
            f"seed {self.seed}: workers {', '.join('/'.join(w) for w in self.workers)}",
            f"{self.ingresses} ingresses, {self.slots} slots, {self.engine_blocks} engine blocks",
            f"kinds: {', '.join(sorted(self.kinds)) or 'none'}",
        ]
        lines += [
            f"request {r.number}: at {r.at_s:.3f} s, {len(r.prompt)} tokens of "
            f"{r.salt or 'nobody'}, wants {r.max_tokens}"
            + (f", cancelled after {r.cancel_s:.3f} s" if r.cancel_s is not None else "")
            + (f", stops at {r.stop}" if r.stop is not None else "")
            for r in self.requests
        ]
        lines += [
            f"fault {f.number}: {f.kind} at {f.at_s:.3f} s for {f.for_s:.2f} s, target {f.target}"
            for f in self.faults
        ]
        return "\n".join(lines)


@dataclass(slots=True)
class Cluster:
    """Sizes that all processes share, and the generator of everything drawn during the run."""

    rng: random.Random
    engine_blocks: int
    seqs_max: int
    step_tokens_max: int
    queue_max: int
    fill_block_s: float
    load_block_s: float
    connector: dict[str, float] = field(default_factory=dict)


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    share = rng.choice((0.0, 0.15, 0.3, 0.5))
    kinds = frozenset(kind for kind in KINDS if rng.random() < share)
    kinds |= frozenset(kind for kind in CLIENT_KINDS if rng.random() < 0.3)
    nodes = ("a",) if rng.random() < 0.7 else ("a", "b")
    workers: list[tuple[str, str]] = []
    for node in nodes:
        few = "one_worker_of_a_role" in kinds
        workers += [("prefill", node)] * (1 if few else rng.choice((1, 1, 2)))
        workers += [("decode", node)] * (1 if few else rng.choice((1, 2)))
    tiny_engine = "tiny_engine" in kinds
    requests = _requests(rng, kinds)
    return Scenario(
        seed=seed,
        kinds=kinds,
        workers=tuple(workers),
        ingresses=rng.choice((1, 1, 2)),
        slots=rng.choice((5, 7, 9)) if "tiny_slab" in kinds else rng.choice((12, 20, 40)),
        engine_blocks=rng.choice((14, 16)) if tiny_engine else 30,
        seqs_max=rng.choice((2, 3, 4)),
        step_tokens_max=rng.choice((6, 10, 16, 40)),
        queue_max=1 if "tiny_queue" in kinds else 16,
        replacement_s=rng.choice((rng.uniform(0.3, 1.5), rng.uniform(0.3, 1.5), 3.5)),
        reconnect_s=rng.choice((0.02, 0.3)),
        attempts_max=rng.choice((3, 6)),
        fill_block_s=rng.choice((0.0003, 0.003)),
        load_block_s=rng.choice((0.0004, 0.006)),
        requests=requests,
        faults=_faults(rng, kinds, requests),
    )


def _requests(rng: random.Random, kinds: frozenset[str]) -> tuple[Asked, ...]:
    tenants = rng.choice((("",), ("", "ann"), ("ann", "ben")))
    shared = [tuple(rng.randrange(2, 250) for _ in range(rng.randrange(4, 17))) for _ in range(2)]
    burst = "tiny_queue" in kinds or rng.random() < 0.4
    at_s = 0.05
    asked = []
    for number in range(rng.randrange(4, 12)):
        at_s += rng.expovariate(20.0 if burst else 6.0)
        prefix = rng.choice((*shared, ()))
        tail = tuple(rng.randrange(2, 250) for _ in range(rng.randrange(1, 10)))
        max_tokens = rng.choice((1, 2, 5, 9, 16, 30))
        asked.append(
            Asked(
                number=number,
                at_s=min(at_s, FAULTS_S),
                ingress=rng.randrange(4),
                prompt=prefix + tail,
                salt=rng.choice(tenants),
                max_tokens=max_tokens,
                min_tokens=rng.choice((0, 0, 2)),
                stop=5 if "stop_string" in kinds and rng.random() < 0.5 else None,
                cancel_s=rng.expovariate(8.0) if "cancel" in kinds and rng.random() < 0.4 else None,
            )
        )
    return tuple(asked)


def _faults(
    rng: random.Random, kinds: frozenset[str], requests: tuple[Asked, ...]
) -> tuple[Fault, ...]:
    """Most of them while some request is on its way."""
    faults = []
    for kind in PROCESS_FAULTS:
        if kind not in kinds:
            continue
        for _ in range(rng.choice((1, 1, 2, 3))):
            at_s = rng.uniform(0.05, FAULTS_S)
            if rng.random() < 0.7:
                at_s = min(FAULTS_S, rng.choice(requests).at_s + rng.expovariate(8.0))
            for_s = rng.choice((rng.uniform(0.05, 0.5), rng.uniform(0.5, 3.5)))
            faults.append(Fault(len(faults), kind, at_s, for_s, rng.randrange(16)))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
