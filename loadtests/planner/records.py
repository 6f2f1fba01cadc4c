"""What the planner reads from Headwater's record of a request (/headwater/requests/ID).

Called by the probe and by the validation. Must not: fail on a record of another version; what it
lacks is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Story:
    """One request. service_ms: that its first token kept a worker busy (prefill and publishing).

    handed_over: whether a prefill worker made the first token and a decode worker the rest.
    """

    service_ms: float
    queue_ms: float
    handed_over: bool
    published_blocks: int
    publish_s: float
    loaded_blocks: int
    load_s: float
    pulled_blocks: int


def story_of(record: Mapping[str, Any]) -> Story | None:
    """None where the record has no first token's account."""
    parts = record.get("ttft")
    attempts = record.get("attempts") or []
    if not parts or not attempts:
        return None
    reports = [attempt.get("kv") or {} for attempt in attempts]

    def total(name: str) -> float:
        return sum(float(report.get(name) or 0) for report in reports)

    roles = {str(attempt.get("role")) for attempt in attempts}
    return Story(
        service_ms=float(parts["prefill_ms"]) + float(parts["publish_ms"]),
        queue_ms=float(parts["queue_ms"]),
        handed_over={"prefill", "decode"} <= roles,
        published_blocks=int(float(reports[0].get("published_blocks") or 0)),
        publish_s=float(reports[0].get("publish_s") or 0),
        loaded_blocks=int(float(reports[-1].get("loaded_blocks") or 0)),
        load_s=float(reports[-1].get("load_s") or 0),
        pulled_blocks=int(total("pulled_blocks")),
    )
