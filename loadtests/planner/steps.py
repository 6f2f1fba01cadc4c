"""A prediction and a plan of workers, step by step, in words.

Called by the plan command. Must not: print a figure without where it comes from, or a plan without
how far its profile can be trusted.
"""

from __future__ import annotations

from math import inf

from loadtests.planner.layouts import WorkerPlan
from loadtests.planner.playing import Heard
from loadtests.planner.predict import Prediction
from loadtests.planner.profile import Profile
from loadtests.planner.sizes import decimal


def prediction_lines(profile: Profile, found: Prediction) -> list[str]:
    """Each step of one prediction."""
    load, layout = found.load, found.layout
    lines = [f"Load: {load.words()}, arriving at random (Poisson); {layout.words()}"]
    lines += _prefill_lines(profile, found)
    lines += _decode_lines(profile, found)
    lines += _room_lines(profile, found)
    lines += _device_lines(found)
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in found.shares.items())
    binds = f"Used: {shares}; {found.bottleneck} is nearest to its limit"
    if not found.is_stable:
        binds += f". IT CANNOT KEEP UP: at most {found.requests_per_s:.3g} requests/s get through"
    lines.append(binds)
    outside = profile.outside(
        new=load.input_tokens,
        batch=1 + found.others,
        context=load.input_tokens + load.output_tokens / 2,
    )
    if outside:
        lines.append(f"Beyond what was measured, so a guess: {', '.join(outside)}")
    return lines


def _prefill_lines(profile: Profile, found: Prediction) -> list[str]:
    load, layout = found.load, found.layout
    alone = profile.service_ms(load.new_tokens, load.cached_tokens)
    lines = [
        (
            f"Prefill of {load.new_tokens} new tokens after {load.cached_tokens} cached: "
            f"{alone:.0f} ms alone"
        )
    ]
    if found.service_ms > alone * 1.001:
        lines[0] += f", {found.service_ms:.0f} ms beside the streams of the decode workers"
    if layout.prefill:
        lines.append(
            f"Way: {found.sent:.0%} of the prompts to prefill workers, the rest at the decode "
            "worker itself, by the router's own prices"
        )
    servers = layout.prefill or layout.decode
    lines.append(
        f"Queue (M/G/c, c = {servers}): no worker is free {found.busy:.0%} of the time; "
        f"{found.waits:.0%} wait, {_ms(found.wait_ms)} each on average"
    )
    lines.append(
        f"TTFT = {profile.overhead_ms:.0f} ms overhead + wait + prefill: mean "
        f"{_ms(found.ttft_ms)}, p50 {_ms(found.ttft_p50_ms)}, p95 {_ms(found.ttft_p95_ms)}"
    )
    return lines


def _decode_lines(profile: Profile, found: Prediction) -> list[str]:
    load, layout = found.load, found.layout
    rate = load.rate_per_s / layout.decode
    lines = [
        (
            f"Decode batch (fixed point): {rate:.3g} requests/s a worker × "
            f"{load.output_tokens - 1} steps × {found.step_ms:.1f} ms = {found.others:.2f} other "
            f"streams; most {found.most_streams:.0f}"
        )
    ]
    alone = profile.step_ms(1 + found.others, load.input_tokens + load.output_tokens / 2)
    if found.step_ms > alone * 1.001:
        lines.append(
            f"  a step: {alone:.1f} ms, {found.step_ms:.1f} ms with what prompts take of the "
            f"worker ({found.stalled:.0%} of its time) and of the machine"
        )
    if found.sent > 0 and found.layout.prefill:
        lines.append(f"  from the first to the second token: {found.gap_ms:.0f} ms (hand-over)")
    lines.append(
        f"TPOT: {found.tpot_ms:.1f} ms = {1e3 / found.tpot_ms:.1f} tokens/s for one user; in all "
        f"{found.output_tokens_per_s:.1f} output tokens/s"
    )
    return lines


def _room_lines(profile: Profile, found: Prediction) -> list[str]:
    load = found.load
    lines = []
    if profile.kv_tokens:
        tokens = load.input_tokens + load.output_tokens
        lines.append(
            f"KV: a decode worker holds {profile.kv_tokens:,} tokens, so "
            f"{profile.kv_tokens // tokens:,} requests of {tokens:,} to their ends"
        )
    link = profile.link
    if link.load_bytes_per_s and profile.block_tokens and found.layout.prefill:
        each = link.block_bytes * load.input_tokens / profile.block_tokens
        rate = load.rate_per_s * found.sent / found.layout.decode
        lines.append(
            f"Link: {rate:.3g} hand-overs/s a decode worker × {decimal(each)} = "
            f"{decimal(rate * each)}/s of {decimal(link.load_bytes_per_s)}/s ({link.what})"
        )
    return lines


def _device_lines(found: Prediction) -> list[str]:
    """Each rate by the workers that do that work, and all by all, apart."""
    load, layout = found.load, found.layout
    rate = found.requests_per_s
    workers = layout.prefill + layout.decode
    both = rate * (load.input_tokens + load.output_tokens) / workers
    output = rate * load.output_tokens / layout.decode
    if not layout.prefill:
        return [
            (
                f"A worker: {rate * load.input_tokens / layout.decode:.1f} input tokens/s, "
                f"{output:.1f} output tokens/s, {both:.1f} in and out together"
            )
        ]
    return [
        (
            f"A prefill worker: {rate * load.input_tokens / layout.prefill:.1f} input tokens/s; a "
            f"decode worker: {output:.1f} output tokens/s; any worker: {both:.1f} tokens/s in and "
            "out together"
        )
    ]


def plan_lines(profile: Profile, plan: WorkerPlan) -> list[str]:
    """The whole answer."""
    sla = plan.sla
    rate = plan.at.load.rate_per_s
    lines = [
        f"SLA: TTFT p95 ≤ {sla.ttft_ms:g} ms, mean TPOT ≤ {sla.tpot_ms:g} ms",
        f"Profile: {profile.model}, measured {profile.at}",
        *(f"  {line}" for line in profile.fit_lines()),
        (
            f"Planned for {plan.with_headroom.load.rate_per_s:.4g} requests/s: "
            f"{rate:.4g} and {plan.headroom:.0%} head-room"
        ),
        *(f"  {line}" for line in prediction_lines(profile, plan.with_headroom)),
    ]
    if plan.prefill is not None:
        lines.append(f"Prefill workers: {plan.prefill.workers}: {plan.prefill.why}")
    role = "Workers" if plan.prefill is None else "Decode workers"
    lines += [
        f"{role}: {plan.decode.workers}: {plan.decode.why}",
        *heard_lines(plan.played),
        (
            f"Binds first: {plan.ends[0]}: beyond {plan.most_rate_per_s:.4g} requests/s, "
            f"{plan.ends[1]}"
        ),
        (
            f"Holds the SLA up to {plan.most_rate_per_s:.4g} requests/s, "
            f"{plan.most_rate_per_s / rate - 1:+.0%} of what was asked for; at {rate:.4g} "
            f"requests/s: TTFT p95 {_ms(plan.at.ttft_p95_ms)}, TPOT {plan.at.tpot_ms:.1f} ms"
        ),
        *profile.trust_lines(),
    ]
    return lines


def heard_lines(heard: Heard | None) -> list[str]:
    """What playing says beside the formulas."""
    if heard is None:
        return []
    ttft = heard.ttft
    return [
        (
            f"Played, {heard.n} random arrivals step by step: TTFT mean {ttft.mean:.0f} ms, p50 "
            f"{ttft.p50:.0f} ms, p95 {ttft.p95:.0f} ms; TPOT {heard.tpot.mean:.1f} ms; "
            f"{heard.sent:.0%} of the prompts to prefill workers"
        )
    ]


def as_json(found: Prediction) -> dict[str, object]:
    """Figures for machines; None for what grows without end."""

    def finite(value: float) -> float | None:
        return None if value == inf else value

    return {
        "layout": {"prefill": found.layout.prefill, "decode": found.layout.decode},
        "rate_per_s": found.load.rate_per_s,
        "input_tokens": found.load.input_tokens,
        "output_tokens": found.load.output_tokens,
        "ttft_ms": {
            "mean": finite(found.ttft_ms),
            "p50": finite(found.ttft_p50_ms),
            "p95": finite(found.ttft_p95_ms),
        },
        "tpot_ms": found.tpot_ms,
        "output_tokens_per_s": found.output_tokens_per_s,
        "streams_a_decode_worker": found.others,
        "sent_to_prefill_share": found.sent,
        "shares": {str(stage): share for stage, share in found.shares.items()},
        "bottleneck": str(found.bottleneck),
        "is_stable": found.is_stable,
    }


def _ms(value: float) -> str:
    return "without end" if value == inf else f"{value:.0f} ms"
