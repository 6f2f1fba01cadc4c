"""The choice among candidates: pair up, find the cheapest, spread ties, explain.

Called by: router/route.py, once per request. Must not: know how costs come about (router/cost.py),
or mutate anything but the order in which equal workers are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

from router.cost import Terms, WorkerCost, cost_terms
from router.decision import Candidate, Reason
from router.settings import RouterSettings
from router.workers import WorkerView


@dataclass(slots=True)
class Worker:
    """A worker as the router keeps it."""

    name: str
    view: WorkerView
    cost: WorkerCost
    engine_source: str
    slab_source: str
    rank: int  # seeded order among workers that were never chosen
    chosen: int = 0  # tick of the last decision that chose it


@dataclass(slots=True)
class Option:
    """One worker's share of a candidate: its terms, and what it has of the prompt."""

    worker: Worker
    terms: Terms
    total_ms: float
    engine_blocks: int
    slab_blocks: int
    pulled_blocks: int = 0  # beyond these, from another node's slab

    @property
    def cached_blocks(self) -> int:
        """Blocks of the prompt that need not be computed here."""
        return max(self.engine_blocks, self.slab_blocks) + self.pulled_blocks


@dataclass(slots=True)
class NodeOptions:
    """The options on one node."""

    prefills: list[Option]
    remotes: list[Option]  # decode workers with the prompt computed by one of prefills
    locals: list[Option]  # decode workers that compute it themselves
    aways: list[Option]  # decode workers with the prompt computed on another node
    is_readable: bool = False  # other nodes can pull from its slab


Pair = tuple[float, Option | None, Option]
"""(cost_ms, prefill, decode)"""


@dataclass(frozen=True, slots=True)
class Choice:
    """The pair chosen, how many were as good, and the candidates, cheapest first."""

    pair: Pair
    tied: int
    candidates: tuple[Candidate, ...]
    total: int
    reason: Reason


def choose(
    nodes: Sequence[NodeOptions], settings: RouterSettings, block_size: int, tick: int
) -> Choice | None:
    """Choose the cheapest pair; of equal ones, that whose workers were chosen longest ago.

    None if there is no pair at all. Mutates the chosen workers' ticks.
    """
    pairs: list[Pair] = []
    for node in nodes:
        locals_ = _shortlist(node.locals, settings.shortlist_max)
        pairs += [(option.total_ms, None, option) for option in locals_]
        if node.prefills and node.remotes:
            prefills = _shortlist(node.prefills, settings.shortlist_max)
            remotes = _shortlist(node.remotes, settings.shortlist_max)
            pairs += [(p.total_ms + d.total_ms, p, d) for p in prefills for d in remotes]
    pairs += _across_nodes(nodes, settings.shortlist_max)
    if not pairs:
        return None
    pairs.sort(key=_cost)
    limit = pairs[0][0] + max(settings.tie_ms, settings.tie_fraction * pairs[0][0])
    tied = [pair for pair in pairs if pair[0] <= limit]
    pair = min(tied, key=_least_recent) if len(tied) > 1 else tied[0]
    reason = _reason(pair, pairs, block_size)
    shown = pairs[: settings.explained_max]
    if pair not in shown:
        shown[-1] = pair
    candidates = tuple(_candidate(shown_pair, block_size) for shown_pair in shown)
    for option in pair[1:]:
        if option is not None:
            option.worker.chosen = tick
    total = sum(len(n.locals) + len(n.prefills) * len(n.remotes) for n in nodes)
    readable = [n for n in nodes if n.is_readable]
    aways = sum(len(n.aways) for n in nodes)
    total += sum(len(n.prefills) * (aways - len(n.aways)) for n in readable)
    return Choice(pair, len(tied), candidates, total, reason)


def _across_nodes(nodes: Sequence[NodeOptions], count: int) -> list[Pair]:
    """Pairs whose decode worker pulls the blocks from the slab of the prefill worker's node."""
    aways = [option for node in nodes for option in node.aways]
    if not aways:
        return []
    prefills = [option for node in nodes if node.is_readable for option in node.prefills]
    return [
        (p.total_ms + d.total_ms, p, d)
        for p in _shortlist(prefills, count)
        for d in _shortlist(aways, count)
        if p.worker.slab_source != d.worker.slab_source
    ]


def ttft_ms(prefill: Option | None, decode: Option) -> float:
    """Predicted time to the first token: it comes from whoever computes the prompt."""
    queue, compute, load, _, wait, _ = (prefill or decode).terms
    return queue + compute + load + wait


def _cost(pair: Pair) -> float:
    return pair[0]


def _least_recent(pair: Pair) -> tuple[int, int, int, int]:
    _, prefill, decode = pair
    if prefill is None:
        return decode.worker.chosen, decode.worker.rank, 0, 0
    return decode.worker.chosen, decode.worker.rank, prefill.worker.chosen, prefill.worker.rank


def _order(option: Option) -> tuple[float, int, int]:
    return option.total_ms, option.worker.chosen, option.worker.rank


def _shortlist(options: list[Option], count: int) -> list[Option]:
    """Return the cheapest; among equals those chosen longest ago, so that all get their turn."""
    return options if len(options) <= count else nsmallest(count, options, key=_order)


def _candidate(pair: Pair, block_size: int) -> Candidate:
    cost_ms, prefill, decode = pair
    computing = prefill or decode
    return Candidate(
        None if prefill is None else prefill.worker.name,
        decode.worker.name,
        cost_ms,
        ttft_ms(prefill, decode),
        cost_terms(None if prefill is None else prefill.terms, decode.terms),
        computing.cached_blocks * block_size,
        0 if prefill is None else prefill.engine_blocks * block_size,
        decode.engine_blocks * block_size,
        computing.slab_blocks * block_size,
        computing.pulled_blocks * block_size,
    )


def _reason(pair: Pair, pairs: list[Pair], block_size: int) -> Reason:
    """Name what decided; for explanation only, nothing depends on it."""
    _, prefill, decode = pair
    if len(pairs) == 1:
        return "only_candidate"
    if prefill is not None:
        others = [p.engine_blocks for _, p, _ in pairs if p is not None]
        best = prefill.engine_blocks
        return "prefix_on_prefill" if best > 0 and best > min(others) else "cheapest"
    remote = next((other for other in pairs if other[1] is not None), None)
    if remote is None or remote[1] is None:
        return "cheapest"
    cached_tokens = decode.cached_blocks * block_size
    saved_ms = cached_tokens * decode.worker.cost.prefill.first
    if saved_ms >= decode.terms[1]:  # than what is left to compute
        return "prefix_on_decode"
    queue_ms, handoff_ms = remote[1].terms[0], remote[2].terms[3]
    return "prefill_busy" if queue_ms > handoff_ms else "short_prompt"
