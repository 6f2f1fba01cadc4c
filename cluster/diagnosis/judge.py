"""The diagnosis: which finding binds, how sure that is, and what comes next.

Called by the diagnose command. Pure. In this order:

1. Without evidence there is no verdict: too few looks, or nobody of a role was heard while nothing
   else binds, or requests wait for something that no rule measures.
2. A finding binds from BINDS_AT on. A shortage (KV capacity, then the queue) goes before whatever
   is busy: it keeps requests away from engines that are busy all the same.
3. Of what is busy the largest binds. Within TIE the one that holds more requests does, and then the
   one that comes first on a request's way (rules.RULES); the other is named, and confidence is low.
4. Otherwise nothing binds, and what is busiest is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from cluster.diagnosis.rules import RULES, Cause, Finding
from cluster.diagnosis.window import ROLES, Window

BINDS_AT = 0.6
SURE_AT = 0.8
TIE = 0.1
LOOKS_MIN = 3
SECONDS_MIN = 1.0
UNEXPLAINED_MAX = 0.3
SHORTAGES = (Cause.KV, Cause.QUEUE)

NOTHING: Final = "nothing binds"
UNKNOWN: Final = "not enough evidence"
Verdict = Cause | Literal["nothing binds", "not enough evidence"]
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What binds. evidence: of the verdict; finding: None unless one binds.

    second: the next candidate; None where no other rule had its evidence. why: what the confidence
    rests on, or why there is no verdict. missing: as in Window.
    """

    verdict: Verdict
    confidence: Confidence
    why: str
    finding: Finding | None
    second: Finding | None
    findings: tuple[Finding, ...]
    missing: tuple[str, ...]


def judge(window: Window) -> Diagnosis:
    """Name what binds. Never guesses: see the module's docstring."""
    found = [finding for rule in RULES if (finding := rule(window)) is not None]
    ranked = _ranked(found)
    lacking = _lacking(window)
    if lacking:
        return _unknown(window, ranked, lacking)
    binding = [finding for finding in ranked if finding.score >= BINDS_AT]
    if binding:
        return _bound(window, ranked, binding)
    unheard = [role for role in ROLES if not window.of_role(role)]
    if unheard or window.front_end is None:
        who = " and ".join([*(f"{role} workers" for role in unheard)] or ["the ingress"])
        return _unknown(window, ranked, f"nothing that was seen binds, and {who} were not heard")
    measured = sum(finding.score for finding in ranked)
    waiting = window.flow.unanswered_share
    if waiting >= BINDS_AT and waiting - measured > UNEXPLAINED_MAX:
        return _unknown(
            window,
            ranked,
            f"requests waited for a token at {100 * waiting:.0f} % of {window.flow.looks} looks, "
            f"but all that was measured was busy for {100 * measured:.0f} % together",
        )
    return _idle(window, ranked)


def _ranked(found: list[Finding]) -> list[Finding]:
    """Shortages that bind first; then by score, equal ones by what they hold, then as in RULES."""
    left = list(found)
    ranked: list[Finding] = []
    while left:
        short = [one for one in left if one.cause in SHORTAGES and one.score >= BINDS_AT]
        if short:
            best = max(short, key=lambda one: one.score)
        else:
            top = max(one.score for one in left)
            equal = [one for one in left if one.score >= top - TIE and one.score > 0]
            best = max(equal or left, key=lambda one: one.held)
        ranked.append(best)
        left.remove(best)
    return ranked


def _lacking(window: Window) -> str:
    """Why no verdict is possible at all; empty when one is."""
    flow = window.flow
    if flow.looks < LOOKS_MIN or window.seconds < SECONDS_MIN:
        return f"{flow.looks} looks in {window.seconds:.1f} s are too few: watch for longer"
    if not window.workers:
        return "no worker was heard"
    return ""


def _bound(window: Window, ranked: list[Finding], binding: list[Finding]) -> Diagnosis:
    finding = binding[0]
    rivals = [
        one
        for one in binding[1:]
        if one.score >= finding.score - TIE
        and (finding.cause in SHORTAGES) == (one.cause in SHORTAGES)
    ]
    confidence: Confidence
    if rivals:
        confidence, why = "low", f"{rivals[0].cause} binds as much"
    elif window.missing:
        confidence, why = "low", "part of the cluster was not seen"
    elif finding.score >= SURE_AT:
        confidence, why = "high", f"{100 * finding.score:.0f} % of the window"
    else:
        confidence, why = "medium", f"{100 * finding.score:.0f} % of the window"
    others = [one for one in ranked if one is not finding]
    return Diagnosis(
        verdict=finding.cause,
        confidence=confidence,
        why=why,
        finding=finding,
        second=others[0] if others else None,
        findings=(finding, *others),
        missing=window.missing,
    )


def _idle(window: Window, ranked: list[Finding]) -> Diagnosis:
    busiest = max(ranked, key=lambda one: one.score)
    flow = window.flow
    flying = flow.parked + flow.prefill + flow.handover + flow.decode
    confidence: Confidence = "high" if busiest.score < BINDS_AT / 2 else "medium"
    if window.missing:
        confidence = "low"
    state = "idle" if not flying and not flow.ended else "under-used"
    why = f"{state}: {flying:.1f} requests in flight on average, {flow.ended} ended in the window"
    others = [one for one in ranked if one is not busiest]
    return Diagnosis(NOTHING, confidence, why, None, busiest, (busiest, *others), window.missing)


def _unknown(window: Window, ranked: list[Finding], why: str) -> Diagnosis:
    second = ranked[0] if ranked and ranked[0].score > 0 else None
    return Diagnosis(UNKNOWN, "low", why, None, second, tuple(ranked), window.missing)
