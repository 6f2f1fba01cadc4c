"""Prices the workers of a model for one request.

Called by: router/route.py, once per request. Must not: choose (router/choice.py does), or know how
a price comes about (router/cost.py does).

In a model of many nodes only some are priced: those that hold the longest prefixes, and those that
have least to do, starting from another node each time. All others are neither warm nor idle.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import nlargest, nsmallest

from router.choice import NodeOptions, Option, Worker
from router.cost import Work, away_terms, decode_terms, prefill_terms
from router.decision import RouteRequest
from router.load import Load, LoadBook
from router.settings import RouterSettings


@dataclass(slots=True)
class NodeGroup:
    """Ready workers of a model on one node; they share a slab."""

    name: str
    slab_source: str
    place: int
    is_readable: bool = False
    """Other nodes can pull blocks from its slab."""
    prefills: list[Worker] = field(default_factory=list)
    decodes: list[Worker] = field(default_factory=list)


@dataclass(slots=True)
class ModelGroup:
    """Workers of a model that take work, by node, and the sources that they can use."""

    block_size: int
    is_leaving: bool = False  # they all drain
    names: set[str] = field(default_factory=set)
    nodes: dict[str, NodeGroup] = field(default_factory=dict)
    slots: int = 0  # of decode workers
    node_of: dict[str, NodeGroup] = field(default_factory=dict)  # source -> its node

    def has_peers(self) -> bool:
        """Whether some node can pull blocks from another."""
        return len(self.nodes) > 1 and any(node.is_readable for node in self.nodes.values())


@dataclass(frozen=True, slots=True)
class Prices:
    """Options by node, and the weight that a ms of delay to others had in them.

    No node at all if none can serve the request; `complete`: no node was left out.
    """

    nodes: list[NodeOptions]
    weight: float
    complete: bool


@dataclass(frozen=True, slots=True)
class Pricing:
    """What prices depend on besides the request."""

    settings: RouterSettings
    loads: LoadBook
    no_handoff: set[str]

    def prices(
        self,
        model: ModelGroup,
        request: RouteRequest,
        matched: dict[str, int],
        now_s: float,
        tick: int,
        *,
        everything: bool = False,
    ) -> Prices:
        """Price the workers that may be used, node by node. Mutates nothing.

        `tick` turns from one request to the next; `everything`: leave no node out.
        """
        settings, load = self.settings, self.loads.load
        taken = 0
        nodes: list[tuple[NodeGroup, list[Load], int]] = []
        groups = model.nodes.values()
        for node in map(_any_role, groups) if request.any_role else groups:
            loads = [load(worker.name, now_s) for worker in node.decodes]
            here = sum([each[0] for each in loads])
            taken += here
            nodes.append((node, loads, here))
        share = min(1.0, taken / max(1, model.slots))
        idle, full = settings.caused_weight_idle, settings.caused_weight_full
        weight = idle + (full - idle) * share
        complete = everything or len(nodes) <= settings.nodes_priced_max
        if not complete:
            nodes = _worth_pricing(nodes, model, matched, settings.nodes_priced_max, tick)
        work = Work(
            total_tokens=request.prompt_tokens + request.resume_tokens,
            block_size=model.block_size,
            output_tokens=min(request.max_tokens, settings.expected_output_tokens),
            weight=weight,
        )
        has_peers = model.has_peers()
        peers = self.peers(model, matched) if has_peers else []
        options: list[NodeOptions] = []
        for node, loads, _ in nodes:
            work.peer_blocks = next((b for b, source in peers if source != node.slab_source), 0)
            options.append(self._node(node, loads, request, work, matched, now_s, has_peers))
        return Prices(options, weight, complete=complete)

    def peers(self, model: ModelGroup, matched: dict[str, int]) -> list[tuple[int, str]]:
        """(blocks, slab) of the two slabs that others can read and that hold most of the prompt."""
        node_of = model.node_of
        found = [
            (blocks, source)
            for source, blocks in matched.items()
            if (node := node_of.get(source)) is not None
            and node.is_readable
            and source == node.slab_source
            and node.name not in self.no_handoff
        ]
        return nlargest(2, found)

    def _node(
        self,
        node: NodeGroup,
        loads: list[Load],
        request: RouteRequest,
        work: Work,
        matched: dict[str, int],
        now_s: float,
        has_peers: bool,  # noqa: FBT001
    ) -> NodeOptions:
        """Price one node. Mutates `work`: scratch."""
        wants, excluded = request.needs_prefill_worker, request.excluded
        # Whoever computes the prompt computes at least its last token.
        most = (work.total_tokens - 1) // work.block_size
        slab_blocks = work.slab_blocks = min(matched.get(node.slab_source, 0), most)
        work.peer_blocks = min(work.peer_blocks, most)
        hands_over = node.name not in self.no_handoff
        options = NodeOptions([], [], [], [], is_readable=node.is_readable)
        if wants is not False and hands_over and (node.decodes or has_peers):
            for worker in node.prefills:
                if worker.name in excluded:
                    continue
                work.engine_blocks = min(matched.get(worker.engine_source, 0), most)
                work.in_flight, work.queued_tokens, _ = self.loads.load(worker.name, now_s)
                terms = prefill_terms(worker.cost, work)
                option = Option(
                    worker, terms, sum(terms), work.engine_blocks, slab_blocks, work.pulled_blocks
                )
                options.prefills.append(option)
        stalled_min = self.settings.streams_stalled_min
        for worker, load in zip(node.decodes, loads, strict=True):
            if worker.name in excluded:
                continue
            work.in_flight, work.queued_tokens, work.free_blocks = load
            work.engine_blocks = matched.get(worker.engine_source, 0)
            work.slots = worker.view.slots
            remote, local = decode_terms(worker.cost, work, stalled_min)
            blocks = min(work.engine_blocks, most)
            if options.prefills:
                options.remotes.append(Option(worker, remote, sum(remote), blocks, slab_blocks))
            if has_peers and hands_over and wants is not False:
                away = away_terms(worker.cost, work, remote)
                options.aways.append(Option(worker, away, sum(away), blocks, slab_blocks))
            if wants is not True:
                options.locals.append(
                    Option(worker, local, sum(local), blocks, slab_blocks, work.pulled_blocks)
                )
        return options


def _any_role(node: NodeGroup) -> NodeGroup:
    """Take every worker of the node for a decode worker."""
    return replace(node, decodes=[*node.decodes, *node.prefills], prefills=[])


def _worth_pricing(
    nodes: list[tuple[NodeGroup, list[Load], int]],
    model: ModelGroup,
    matched: dict[str, int],
    count: int,
    tick: int,
) -> list[tuple[NodeGroup, list[Load], int]]:
    """Pick the warmest and the idlest nodes (see the module's docstring), `count` at most."""
    warm: dict[int, int] = {}
    node_of = model.node_of
    for source, blocks in matched.items():
        node = node_of.get(source)
        if node is not None and warm.get(node.place, 0) < blocks:
            warm[node.place] = blocks
    places = nlargest(count // 2, warm, key=warm.__getitem__)
    turn, total = tick % len(nodes), len(nodes)
    usable = [n for n in nodes if n[0].decodes]
    idle = nsmallest(
        count - len(places),
        usable,
        key=lambda n: (n[2] / len(n[0].decodes), (n[0].place - turn) % total),
    )
    places += [n[0].place for n in idle]
    if model.has_peers():  # the prompt may be computed where no decode worker is
        prefill_only = [n for n in nodes if n[0].prefills and not n[0].decodes]
        turned = nsmallest(count // 2, prefill_only, key=lambda n: (n[0].place - turn) % total)
        places += [n[0].place for n in turned]
    return [nodes[place] for place in sorted(set(places))]
