"""Which loads a sweep tries, and what its steps say: the search for the knee, without a server.

Called by the `sweep` command, which runs a load test at each load that a search yields and sends
back whether its SLOs held. Must not: send, wait or print.

Definitions. A step holds if at least a given share of its measured requests (95 % unless told) met
every SLO; a failed request met none. The knee is the highest load tried that held and below which
none broke. The throughput knee needs no SLO: the lowest load whose throughput is at least 95 % of
the highest one seen; it is not seen as long as that is the highest load of the sweep, since
throughput may still grow beyond.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

from loadtests.load.metrics import meets
from loadtests.load.records import Outcome, Run

WITHIN_SHARE = 0.95
THROUGHPUT_SHARE = 0.95
Search = Generator[float, bool, None]
"""Yields a load, is sent whether it held, ends when it knows enough."""


@dataclass(frozen=True, slots=True)
class Step:
    """One load of a sweep. n: measured requests, and those that were due and found no place to be
    sent from. within: of these, how many met every SLO.

    per_s: successful requests a second. load: requests a second, or users of a closed loop.
    """

    load: float
    n: int
    within: int
    per_s: float
    share: float = WITHIN_SHARE

    @property
    def held(self) -> bool:
        """A step that measured nothing held nothing."""
        return self.n > 0 and self.within >= self.share * self.n


@dataclass(frozen=True, slots=True)
class Knee:
    """What a sweep found; each None where it was not seen.

    highest_held and lowest_broken enclose the knee. out_of_order: loads that held above one that
    broke: the steps are too short, or the server changed.
    """

    highest_held: float | None
    lowest_broken: float | None
    throughput: float | None
    out_of_order: tuple[float, ...]

    def sentence(self, unit: str) -> str:
        """The finding in words; unit: such as "requests/s"."""
        if self.highest_held is None and self.lowest_broken is None:
            found = "No step was completed: there is no knee to tell"
        elif self.highest_held is None:
            found = f"No load held: the knee is below {self.lowest_broken:g} {unit}"
        elif self.lowest_broken is None:
            found = f"Every load held: the knee is above {self.highest_held:g} {unit}"
        else:
            found = (
                f"The knee is {self.highest_held:g} {unit}: that held, "
                f"{self.lowest_broken:g} did not"
            )
        if self.out_of_order:
            loads = ", ".join(f"{load:g}" for load in self.out_of_order)
            found += f" (though {loads} held too: take longer steps before you believe it)"
        if self.throughput is None:
            return f"{found}. Throughput did not level off within the sweep."
        return f"{found}. Throughput levels off at {self.throughput:g} {unit}."


def step_of(run: Run, load: float, share: float = WITHIN_SHARE) -> Step:
    """What one run says about its load, by the run's own SLOs."""
    measured = [sample for sample in run.samples if sample.measured]
    good = [sample for sample in measured if sample.outcome is Outcome.OK]
    begin_s, end_s = run.window_s
    ended = sum(begin_s <= sample.ended_s <= end_s for sample in good)
    return Step(
        load=load,
        n=len(measured) + int(run.facts.get("unsent_due") or 0),
        within=sum(meets(sample, run.slo) for sample in good),
        per_s=ended / (end_s - begin_s) if end_s > begin_s else 0.0,
        share=share,
    )


def ladder(loads: Iterable[float], *, past_break: bool = False) -> Search:
    """Rising loads up to the first that breaks, or all. Raises ValueError."""
    rising = sorted(set(loads))
    if not rising or rising[0] <= 0:
        raise ValueError("a sweep needs loads above 0")
    return _ladder(rising, past_break=past_break)


def _ladder(loads: Sequence[float], *, past_break: bool) -> Search:
    for load in loads:
        held = yield load
        if not held and not past_break:
            return


def bisection(least: float, most: float, *, precision: float = 0.1, whole: bool = False) -> Search:
    """Doubles from `least` until a load breaks or `most` holds, then halves what is between.

    Ends when the lowest load that broke is within `precision` of the highest that held (0.1: a
    tenth above it), or, with `whole`, one above it. Raises ValueError.
    """
    if not 0 < least < most:
        raise ValueError(f"a search goes from a load above 0 to a higher one: {least:g}, {most:g}")
    if not 0 < precision < 1:
        raise ValueError(f"a precision is between 0 and 1, not {precision:g}")
    if whole and (least != int(least) or most != int(most)):
        raise ValueError(f"users are whole numbers, not {least:g} or {most:g}")
    return _bisection(least, most, precision=precision, whole=whole)


def _bisection(least: float, most: float, *, precision: float, whole: bool) -> Search:
    held, broken, load = 0.0, 0.0, least
    while not broken:
        if (yield load):
            if load == most:
                return
            held, load = load, min(2 * load, most)
        else:
            broken = load
    if not held:
        return  # the least load broke: what is below was not asked about
    while broken > held * (1 + precision) and not (whole and broken - held <= 1):
        middle = (held + broken) / 2
        if whole:
            middle = float(int(middle))
        if (yield middle):
            held = middle
        else:
            broken = middle


def knee(steps: Iterable[Step]) -> Knee:
    """Of the completed steps, in whatever order."""
    by_load = sorted(steps, key=lambda step: step.load)
    broken = [step.load for step in by_load if not step.held]
    lowest_broken = broken[0] if broken else None
    held = [step.load for step in by_load if step.held]
    below = [load for load in held if lowest_broken is None or load < lowest_broken]
    return Knee(
        highest_held=below[-1] if below else None,
        lowest_broken=lowest_broken,
        throughput=_throughput_knee(by_load),
        out_of_order=tuple(held[len(below) :]),
    )


def _throughput_knee(by_load: Sequence[Step]) -> float | None:
    most = max((step.per_s for step in by_load), default=0.0)
    if most <= 0:
        return None
    first = next(step for step in by_load if step.per_s >= THROUGHPUT_SHARE * most)
    return None if first is by_load[-1] else first.load
