"""The diagnosis as text for people, and as JSON for machines.

Called by the diagnose command. Pure. Must not judge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from cluster.diagnosis.judge import NOTHING, UNKNOWN, Diagnosis
from cluster.diagnosis.rules import Finding
from cluster.diagnosis.window import Window


def lines(diagnosis: Diagnosis, window: Window, *, model: str, endpoint: str) -> Iterable[str]:
    """What binds, why, what to change, what comes next, and what was not seen."""
    heard = len(window.workers)
    yield (
        f"{model} at {endpoint}/v1: {window.seconds:.1f} s watched, {window.flow.looks} looks, "
        f"{heard} worker{'' if heard == 1 else 's'} heard"
    )
    yield ""
    yield _verdict(diagnosis)
    if diagnosis.finding is not None:
        yield from _indented(diagnosis.finding.evidence)
        yield "Change (./headwater config shows each):"
        width = max(len(one.key) for one in diagnosis.finding.settings)
        for setting in diagnosis.finding.settings:
            yield f"  {setting.change:<6} {setting.key:<{width}}  {setting.effect}"
    if diagnosis.second is not None:
        yield from _second(diagnosis, diagnosis.second)
    if diagnosis.missing:
        yield "Not seen:"
        yield from _indented(diagnosis.missing)
    if window.degraded:
        yield "Degraded:"
        yield from _indented(window.degraded)


def as_json(diagnosis: Diagnosis, window: Window) -> dict[str, Any]:
    """All of it, the figures of the window included."""
    return {
        **asdict(diagnosis),
        "scores": {str(finding.cause): finding.score for finding in diagnosis.findings},
        "window": asdict(window),
    }


def _verdict(diagnosis: Diagnosis) -> str:
    if diagnosis.verdict in {NOTHING, UNKNOWN}:
        first = str(diagnosis.verdict)
        sure = "" if diagnosis.verdict == UNKNOWN else f" ({diagnosis.confidence} confidence)"
        return f"{first[0].upper()}{first[1:]}{sure}: {diagnosis.why}."
    return f"Binds: {diagnosis.verdict} ({diagnosis.confidence} confidence: {diagnosis.why})."


def _second(diagnosis: Diagnosis, second: Finding) -> Iterable[str]:
    name = "Busiest" if diagnosis.verdict == NOTHING else "Next candidate"
    yield f"{name}: {second.cause}, {100 * second.score:.0f} % of the window."
    yield from _indented(second.evidence)


def _indented(texts: Iterable[str]) -> Iterable[str]:
    return (f"  {text}" for text in texts)
