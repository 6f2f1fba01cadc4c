"""A request's record told: as JSON for machines and as a short story for people.

Called by the ingress (`/headwater/requests/<id>`) and through it by `headwater explain`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from deployments.flow.flow_types import KvReport
from deployments.flow.request_record import AttemptRecord, RequestRecord, ttft_parts
from router.decision import Candidate, Decision


def as_json(record: RequestRecord) -> dict[str, Any]:
    """The record with its TTFT parts; times are seconds since the request was received."""
    zero_s = record.received_s
    parts = ttft_parts(record)
    return {
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "model": record.model,
        "key": record.key,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "local_cached_tokens": record.local_cached_tokens,
        "outcome": record.outcome,
        "detail": record.detail,
        "ttft": asdict(parts) if parts else None,
        "duration_s": None if record.ended_s is None else record.ended_s - zero_s,
        "decisions": [json.loads(decision.as_json()) for decision in record.decisions],
        "attempts": [_attempt_json(attempt, zero_s) for attempt in record.attempts],
    }


def _attempt_json(attempt: AttemptRecord, zero_s: float) -> dict[str, Any]:
    body = asdict(attempt)
    for name in ("submitted_s", "first_output_s", "ended_s"):
        if body[name] is not None:
            body[name] -= zero_s
    return body


def story(records: Sequence[RequestRecord]) -> str:
    """What happened, in a few lines a person can read."""
    lines: list[str] = []
    for index, record in enumerate(records):
        if len(records) > 1:
            lines.append(f"Choice {index + 1} of {len(records)}:")
        lines += _one_story(record)
    return "\n".join(lines)


def _one_story(record: RequestRecord) -> list[str]:
    lines = [f"{record.prompt_tokens} prompt tokens for {record.model}."]
    for decision in record.decisions:
        lines += _decision_lines(decision)
    for number, attempt in enumerate(record.attempts, start=1):
        lines.append(_attempt_line(number, attempt, record.received_s))
    parts = ttft_parts(record)
    if parts is not None:
        lines.append(
            f"First token after {parts.total_ms:.0f} ms: tokenise {parts.tokenise_ms:.1f}, "
            f"queue {parts.queue_ms:.1f}, prefill {parts.prefill_ms:.1f}, "
            f"publish {parts.publish_ms:.1f}, hand-over {parts.handover_ms:.1f}, "
            f"delivery {parts.delivery_ms:.1f}."
        )
    lines.append(_end_line(record))
    return lines


def _decision_lines(decision: Decision) -> list[str]:
    where = (
        f"prefill on {decision.prefill}, then decode on {decision.decode}"
        if decision.prefill
        else f"all of it on {decision.decode}"
    )
    told = (
        f"Decision: {where} ({decision.reason}); {decision.cached_tokens} tokens known to be "
        f"cached, first token predicted after {decision.predicted_ttft_ms:.0f} ms."
    )
    lines = [told]
    if decision.pull_from:
        lines.append(f"  Blocks that its own node has not come from node {decision.pull_from}.")
    if decision.prefix_information == "degraded":
        sources = ", ".join(decision.degraded_sources)
        lines.append(f"  The directory was not sure of {sources}: their blocks did not count.")
    lines += [_candidate_line(candidate) for candidate in decision.candidates[:4]]
    return lines


def _candidate_line(candidate: Candidate) -> str:
    terms = candidate.terms
    way = f"{candidate.prefill or '-'} > {candidate.decode}"
    return (
        f"  {way}: {candidate.cost_ms:.0f} ms = queue {terms.queue_ms:.0f} + compute "
        f"{terms.compute_ms:.0f} + load {terms.load_ms:.0f} + hand-off {terms.handoff_ms:.0f} "
        f"+ decode {terms.decode_ms:.0f} + delay to others {terms.caused_ms:.0f}"
    )


def _attempt_line(number: int, attempt: AttemptRecord, zero_s: float) -> str:
    line = (
        f"{number}. at {attempt.submitted_s - zero_s:.3f} s to {attempt.worker} as "
        f"{attempt.role} ({attempt.why}"
    )
    if attempt.resumed_tokens:
        line += f", with {attempt.resumed_tokens} tokens made before"
    line += f"): {attempt.tokens} tokens, {attempt.outcome}"
    kv = attempt.kv
    if kv is not None:
        line += f"; loaded {kv.loaded_blocks} blocks{_pulled(attempt, kv)}, "
        line += f"computed {kv.computed_tokens} tokens, published {kv.published_blocks} blocks"
        if kv.failed_blocks:
            line += f", {kv.failed_blocks} blocks failed to load and were recomputed"
    return line + "."


def _pulled(attempt: AttemptRecord, kv: KvReport) -> str:
    """How many of the loaded blocks came from another node."""
    if not attempt.pull_from:
        return ""
    took = f" in {1e3 * kv.pull_s:.0f} ms" if kv.pulled_blocks else ""
    why = f" (pull ended early: {kv.pull_failure})" if kv.pull_failure else ""
    before = f", {kv.prefetched_blocks} while it computed them" if kv.prefetched_blocks else ""
    return f", {kv.pulled_blocks} of them pulled from node {attempt.pull_from}{took}{why}{before}"


def _end_line(record: RequestRecord) -> str:
    if record.outcome is None:
        return "Still running."
    took = "" if record.ended_s is None else f" after {record.ended_s - record.received_s:.2f} s"
    detail = f" ({record.detail})" if record.detail else ""
    return f"{str(record.outcome).capitalize()}{took}, {record.output_tokens} tokens{detail}."
