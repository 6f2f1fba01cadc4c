"""Lesson: where two requests' blocks lie, from their own numbering down to the slab."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from kvcache.agent import AgentServer
from loadtests import plots as style
from loadtests.lessons.lesson import Bench, Data, Table
from loadtests.lessons.records import Job, Played

NAME = "block_map"
TITLE = "Logical, physical, slab: where two requests' blocks lie"
QUESTION = "Two requests begin alike: which memory do they share, and where is it?"
TERMS = ("block", "KV cache", "prefix caching", "slab", "scheduler")
EXPLANATION = """
A request counts its own blocks from 0: those are logical. The scheduler's block table says which
physical block of the engine's cache each one is; they need not lie side by side. Two requests that
begin alike point to the same physical blocks as far as they agree in full blocks.

Headwater's connector copies each full block that was computed into the node's slab, where other
workers find it by its name, a hash of all tokens up to its end. What is drawn here was read from
the scheduler of a running engine and from the node agent that keeps the slab. The last block of a
request is not full yet: it has no name, and is in no slab.
"""
SHARED_BLOCKS = 3
OWN_TOKENS = (40, 75)
OUTPUT = 40
SLAB_BLOCKS = 24
AGENT_TIMEOUT_S = 20.0
CONTEXT = 1024


def measure(bench: Bench) -> Data:
    """Two requests at once on an engine with a node agent."""
    facts = bench.engine().facts()
    block = facts.block_size
    limit = min(CONTEXT, bench.context_max)
    socket_path = str(bench.scratch / "agent.sock")
    agent = AgentServer(socket_path, SLAB_BLOCKS * int(facts.block_bytes) + (1 << 20))
    try:
        engine = bench.engine(
            max_model_len=limit, max_num_batched_tokens=limit, agent_socket=socket_path
        )
        try:
            engine.watch(blocks=True)
            bench.say("two requests with a common beginning")
            begin = bench.prompt(SHARED_BLOCKS * block, seed=61)
            jobs = [
                Job(name, begin + bench.prompt(own, seed=62 + i), OUTPUT)
                for i, (name, own) in enumerate(zip("AB", OWN_TOKENS, strict=True))
            ]
            # Computed once, the beginning is there for both.
            head = engine.play([Job("first", begin, 1)])
            played = engine.play(jobs)
            names = {name: list(answer.names) for name, answer in played.answers.items()}
            every = sorted({each for row in names.values() for each in row})
            slots = engine.apply(slab_slots, every)
        finally:
            bench.end(engine)
        agent.validate()
    finally:
        agent.close()
    assert head.answers["first"].finish_reason == "length"
    tables = last_tables(played)
    return {
        "n": {"requests": len(jobs), "blocks": len({b for row in tables.values() for b in row})},
        "conditions": {
            "block, tokens": block,
            "tokens in common": SHARED_BLOCKS * block,
            "prompts, tokens": [len(job.prompt) for job in jobs],
            "output tokens": OUTPUT,
        },
        "block": block,
        "requests": [
            {
                "name": name,
                "tokens": played.answers[name].prompt_tokens + OUTPUT - 1,
                "cached_tokens": played.answers[name].cached_tokens,
                "physical": list(tables[name]),
                "names": names[name],
                "slots": [slots.get(each) for each in names[name]],
            }
            for name in tables
        ],
    }


def last_tables(played: Played) -> dict[str, tuple[int, ...]]:
    """The block tables of the last step in which all requests ran."""
    most = max(len(step.blocks) for step in played.steps)
    last = [step for step in played.steps if len(step.blocks) == most][-1]
    return dict(last.blocks)


def slab_slots(host: Any, names: list[str]) -> dict[str, int]:
    """In the engine's process: the slab slot of each published block, asked of the agent."""
    store = host.connector.session.store()
    assert store is not None, "the engine has lost its agent"
    found = {}
    for name in names:
        (*refs,) = store.lease_prefix("lesson", [bytes.fromhex(name)], AGENT_TIMEOUT_S).result(
            AGENT_TIMEOUT_S
        )
        if refs:
            found[name] = refs[0].slot
        store.release("lesson")
    return found


def reading(data: Data) -> tuple[str, str]:
    """What is shared in the engine; what is in the slab."""
    one, two = data["requests"]
    shared = [a for a, b in zip(one["physical"], two["physical"], strict=False) if a == b]
    both = len(set(one["physical"]) | set(two["physical"]))
    apart = len(one["physical"]) + len(two["physical"])
    told = (
        f"requests {one['name']} and {two['name']} have {len(one['physical'])} and "
        f"{len(two['physical'])} logical blocks in {both} physical ones"
    )
    if shared:
        first = (
            f"They share memory: {told}, since the first {len(shared)} (physical "
            f"{', '.join(map(str, shared))}) are the same; apart they would take {apart}."
        )
    else:
        first = f"Effect not seen: {told}, and none of them is shared."
    by_name: dict[str, set[int]] = {}
    full = 0
    for request in (one, two):
        full += len(request["names"])
        for name, slot in zip(request["names"], request["slots"], strict=True):
            if slot is not None:
                by_name.setdefault(name, set()).add(slot)
    once = all(len(slots) == 1 for slots in by_name.values())
    different = len({slot for slots in by_name.values() for slot in slots}) == len(by_name)
    if by_name and once and different:
        second = (
            f"In the slab the {full} full blocks of both lie in {len(by_name)} slots, one for each "
            f"name, whichever request computed it; {_numbered_alike(data)} of these slots have the "
            "number of the physical block."
        )
    elif by_name:
        second = "In the slab a name lies in more than one slot, which should not be."
    else:
        second = "Effect not seen: no full block of either was found in the slab."
    return first, second


def _numbered_alike(data: Data) -> str:
    pairs = {
        (block, slot)
        for request in data["requests"]
        for block, slot in zip(request["physical"], request["slots"], strict=False)
        if slot is not None
    }
    alike = sum(block == slot for block, slot in pairs)
    return str(alike) if alike else "none"


def plots(data: Data) -> list[Figure]:
    """The map: logical blocks, physical blocks, slab slots."""
    drawn, axes = style.figure("Two requests that begin alike", "", "", size=(8.0, 5.2))
    axes.set_axis_off()
    physical = sorted({block for r in data["requests"] for block in r["physical"]})
    slots = sorted({slot for r in data["requests"] for slot in r["slots"] if slot is not None})
    rows = max(len(physical), len(slots), sum(len(r["physical"]) + 1 for r in data["requests"]))
    at_physical = {block: _place(i, len(physical), rows) for i, block in enumerate(physical)}
    at_slot = {slot: _place(i, len(slots), rows) for i, slot in enumerate(slots)}
    joined: dict[int, int] = {}
    at = 0.0
    for index, request in enumerate(data["requests"]):
        color = style.PALETTE[index]
        for logical, block in enumerate(request["physical"]):
            _box(axes, 0.0, at, f"{request['name']}{logical}", color)
            axes.plot([1.0, 3.0], [-at, -at_physical[block]], color=color, linewidth=1.2)
            slot = request["slots"][logical] if logical < len(request["slots"]) else None
            if slot is not None:
                joined[block] = slot
            at += 1
        at += 1
    for block, place in at_physical.items():
        owners = [r for r in data["requests"] if block in r["physical"]]
        color = (
            style.PALETTE[2]
            if len(owners) > 1
            else style.PALETTE[data["requests"].index(owners[0])]
        )
        _box(axes, 3.0, place, str(block), color)
    for block, slot in joined.items():
        axes.plot([4.0, 6.0], [-at_physical[block], -at_slot[slot]], color=style.INK, linewidth=0.8)
    for slot, place in at_slot.items():
        _box(axes, 6.0, place, str(slot), style.PALETTE[6])
    for left, words in ((0.0, "logical"), (3.0, "physical"), (6.0, "slab slot")):
        axes.text(left + 0.5, 1.1, words, ha="center", fontweight="bold", color=style.INK)
    axes.set_xlim(-0.1, 7.1)
    axes.set_ylim(-rows, 1.8)
    return [drawn]


def _place(index: int, count: int, rows: int) -> float:
    """Spread evenly from top to bottom."""
    return index * (rows - 1) / max(1, count - 1) if count > rows // 2 else index * 2.0


def _box(axes: Any, left: float, at: float, words: str, color: str) -> None:
    axes.barh([-at], [1.0], left=left, height=0.7, color=color, alpha=0.85)
    axes.text(
        left + 0.5,
        -at,
        words,
        ha="center",
        va="center",
        fontsize=8,
        fontweight="bold",
        color="white",
    )


def tables(data: Data) -> list[Table]:
    """The same in figures, with the names."""
    rows = []
    for request in data["requests"]:
        for logical, block in enumerate(request["physical"]):
            named = logical < len(request["names"])
            slot = request["slots"][logical] if named else None
            tokens = min(data["block"], request["tokens"] - logical * data["block"])
            rows.append(
                (
                    f"{request['name']}{logical}",
                    str(block),
                    "none" if slot is None else str(slot),
                    f"{tokens} of {data['block']}",
                    f"{request['names'][logical][:16]}…" if named else "none: not full",
                )
            )
    head = ("logical", "physical", "slab slot", "tokens at the end", "name")
    return [Table("Block tables, in the last step in which both ran", head, tuple(rows))]
