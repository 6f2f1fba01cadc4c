"""Hand-made samples and runs, whose figures can be told by heart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtests.load.records import Chunk, Outcome, Run, Sample


def sample(
    index: int = 0,
    *,
    sent_s: float = 0.0,
    at_s: Sequence[float] = (0.5, 0.75),
    tokens: Sequence[int] | None = None,
    outcome: Outcome = Outcome.OK,
    **fields: Any,
) -> Sample:
    """Chunks at these times, a token each unless `tokens` says otherwise."""
    counts = tokens or [1] * len(at_s)
    known = {
        "group": "",
        "due_s": sent_s,
        "ended_s": at_s[-1] if at_s else sent_s,
        "input_tokens": 100,
        "output_tokens": sum(counts),
    }
    return Sample(
        index=index,
        sent_s=sent_s,
        outcome=outcome,
        chunks=tuple(Chunk(at, count) for at, count in zip(at_s, counts, strict=True)),
        **{**known, **fields},
    )


def run_of(*samples: Sample, window_s: tuple[float, float] = (0.0, 10.0), **fields: Any) -> Run:
    known: dict[str, Any] = {"label": "by hand", "conditions": {}, "facts": {}}
    return Run(window_s=window_s, samples=samples, **{**known, **fields})
