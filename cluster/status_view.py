"""Draws the status of a cluster: tables of workers and slabs, and a line on everything else.

Pure: from the JSON of /headwater/status and /headwater/ledger to something that `rich` prints, on
a terminal or into a pipe. Called by the status command, which fetches and refreshes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.held_view import NODE_CHARACTERS, held_lines

Found = Mapping[str, Any]
STATE_STYLES = {"ready": "green", "stalled": "bold red", "refused": "bold red"}
OTHER_STATE_STYLE = "yellow"
OUTCOMES = {"refused": "rejected"}  # words for people, where the field's name is another
# Why a stream of block events went out of sync. "unknown_source" is left out: each worker that ran
# before the ingress connected to it causes one, since its stream is joined in the middle.
FIRST_CONTACT = "unknown_source"
OUT_OF_SYNC = {
    "digest": "differing digest",
    "gap": "missing events",
    "incarnation": "restarted writer",
    "silent": "silent writer",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one look gave.

    status: of /headwater/status. nodes: of /headwater/ledger, one entry a node; held: what it says
    of workers and requests, where that was asked for.
    """

    endpoint: str
    status: Found
    nodes: Sequence[Found] = field(default_factory=tuple)
    held: Mapping[str, Sequence[Found]] = field(default_factory=dict)


def draw(shot: Snapshot, *, leases: bool, trouble: str = "", when: str = "") -> RenderableType:
    """Everything, on one screen. leases: all that is held, with owners and ages.

    trouble: why what is shown may be old; when: the time that is shown beside the title.
    """
    status = shot.status
    parts: list[RenderableType] = [_title(shot, when)]
    if trouble:
        parts.append(Text(trouble, style="bold red"))
    parts += [Text(""), _workers(status["workers"])]
    if shot.nodes:
        parts += [Text(""), _slabs(shot.nodes)]
    parts += [Text(""), *(Text(line) for line in _lines(status))]
    parts += [Text(f"Degraded: {what}", style="yellow") for what in status["degraded"]]
    if leases:
        parts += [Text(""), *(Text(line) for line in held_lines(shot.nodes, shot.held))]
    return Group(*parts)


def slabs_of(nodes: Iterable[Found]) -> list[dict[str, Any]]:
    """Each node's slots and leases in figures, or its error."""
    return [
        {"node": node["node"], "error": node["error"]} if "error" in node else _figures(node)
        for node in nodes
    ]


def percent(share: float | None) -> str:
    """A share from 0 to 1; "-" where there is none yet."""
    return "-" if share is None else f"{100 * share:.0f} %"


def _figures(node: Found) -> dict[str, Any]:
    books = node["books"]
    names = ("slots_total", "free", "published", "filling", "quarantined", "retired")
    return {
        "node": node["node"],
        **{name: books[name] for name in names},
        "leased_slots": books["leased_slots"],
        "leases": len(books["leases"]),
    }


def _title(shot: Snapshot, when: str) -> Text:
    status = shot.status
    place = f" at {shot.endpoint}/v1 ({status['ingress']})"
    text = Text.assemble((str(status["model"]), "bold"), place)
    return text.append(f"   {when}", style="dim") if when else text


def _table(*columns: str, left: int) -> Table:
    """Without lines; the first ``left`` columns are words."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    return table


def _workers(workers: Sequence[Found]) -> RenderableType:
    if not workers:
        return Text("No worker yet.", style="yellow")
    table = _table(
        *("WORKER", "ROLE", "STATE", "PID", "RUN", "WAIT", "QUEUED"),
        *("KV FREE", "PUBLISHED", "LOADED", "CACHED"),
        left=3,
    )
    for worker in workers:
        state = str(worker["state"])
        table.add_row(
            str(worker["id"]),
            str(worker["role"]),
            Text(state, style=STATE_STYLES.get(state, OTHER_STATE_STYLE)),
            str(worker["pid"]),
            *(_count(worker, name) for name in ("running", "waiting", "queued_tokens")),
            f"{worker['free_blocks']}/{worker['total_blocks']}" if "free_blocks" in worker else "-",
            *(_count(worker, name) for name in ("blocks_published_total", "blocks_loaded_total")),
            percent(cached_share_of(worker)),
        )
    return table


def cached_share_of(worker: Found) -> float | None:
    """Of the prompts whose first token the worker made, the part that a cache had."""
    prompts = worker.get("prompt_tokens_total")
    return worker["cached_tokens_total"] / prompts if prompts else None


def _slabs(nodes: Sequence[Found]) -> Table:
    table = _table(
        *("NODE", "SLOTS", "FREE", "PUBLISHED", "FILLING", "QUARANTINED", "LEASED", "LEASES"),
        left=1,
    )
    for one in slabs_of(nodes):
        name = one["node"][:NODE_CHARACTERS]
        if "error" in one:
            table.add_row(f"{name}: {' '.join(str(one['error']).split())}")
            continue
        keys = ("slots_total", "free", "published", "filling", "quarantined")
        table.add_row(name, *(str(one[key]) for key in (*keys, "leased_slots", "leases")))
    return table


def _count(worker: Found, name: str) -> str:
    """A figure that only a linked worker has."""
    return str(worker.get(name, "-"))


def _lines(status: Found) -> list[str]:
    requests, places = status["requests"], status["admission"]
    flying = ", ".join(f"{n} {stage}" for stage, n in requests["in_flight"].items() if n)
    ended = ", ".join(
        f"{n} {OUTCOMES.get(outcome, outcome)}" for outcome, n in requests["outcomes"].items()
    )
    queue = (
        f"Queue: {places['in_flight']} of {places['limit']} places taken "
        f"({places['slots']} are engine slots)."
    )
    if places["refused_total"]:
        queue += f" {places['refused_total']} of the rejected requests found no free place."
    totals = (
        f"Hand-overs {requests['handovers_total']}, resumes {requests['resumes_total']}, "
        f"role fallbacks {requests['role_fallbacks_total']}."
    )
    return [
        f"Requests now: {flying or 'none'}. Ended: {ended}.",
        queue,
        _cache_line(status["cache"]),
        *_audit_lines(status["audits"]),
        totals,
        _directory_line(status["directory"]),
        *(scaling_line(note) for note in status.get("scaling", ())),
        *_copies_lines(status["workers"]),
    ]


def scaling_line(note: Found) -> str:
    """What the autoscaler decided last for a role, why, and when it last changed something."""
    size = f"{note['replicas']}, of {note['replicas_min']} to {note['replicas_max']}"
    line = f"Autoscaling {note['role']}: {size}; {note['action']}: {note['why']}."
    last = note.get("last_change")
    if last is None or last["at_s"] == note["at_s"]:
        return line
    ago_s = note["at_s"] - last["at_s"]
    return f"{line} {ago_s:.0f} s before, {last['before']} to {last['after']} ({last['why']})."


def _cache_line(cache: Found) -> str:
    total, minute = cache["total"], cache["last_minute"]
    return (
        f"Cached: {percent(total['cached_share'])} of {total['prompt_tokens']} prompt tokens; "
        f"in the last minute {percent(minute['cached_share'])} of {minute['prompt_tokens']}."
    )


def _audit_lines(audits: Found) -> list[str]:
    """Nothing where audits are off and there were none."""
    outcomes = audits["outcomes"]
    if not audits["share"] and not any(outcomes.values()):
        return []
    ended = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    return [f"Audits of reused KV ({100 * audits['share']:g} % of requests): {ended}."]


def _directory_line(directory: Found) -> str:
    age_s = directory["heard_age_s"]
    heard = "not heard from" if age_s is None else f"heard {age_s:.1f} s ago"
    sources = ", ".join(
        f"{_short(source['source'])} {source['blocks']} blocks {source['freshness']}"
        + (f" ({source['reason']})" if source.get("reason") else "")
        for source in directory["sources"]
    )
    return f"Directory: {heard}; {sources or 'no blocks yet'}; {_audits(directory)}."


def _audits(directory: Found) -> str:
    """How often the writers' digests were right, and how often their streams were out of sync."""
    reasons = {
        OUT_OF_SYNC.get(reason, reason): n
        for reason, n in sorted(directory["degraded_total"].items())
        if reason != FIRST_CONTACT
    }
    why = ", ".join(f"{n} {reason}" for reason, n in reasons.items())
    return (
        f"digests {directory['digests_equal_total']} equal, "
        f"{directory['digests_differ_total']} different; "
        + (f"out of sync since the start: {why}" if why else "never out of sync")
    )


def _copies_lines(workers: Sequence[Found]) -> list[str]:
    """Which way blocks take between engines and slabs: a line for each that is taken."""
    by_way: dict[str, list[str]] = {}
    for worker in workers:
        if worker.get("kv_copies"):
            by_way.setdefault(worker["kv_copies"], []).append(worker["id"])
    return [f"Block copies of {', '.join(names)}: {way}." for way, names in by_way.items()]


def _short(source: str) -> str:
    """A slab is named after its node, by 56 characters."""
    kind, _, name = source.partition(":")
    return f"{kind}:{name[:NODE_CHARACTERS]}" if kind == "slab" else source
