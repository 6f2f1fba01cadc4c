"""A profile: what one model on one kind of worker takes, as measured, and the fits to that.

Written by `headwater profile` (loadtests/planner/probe.py measures), read by `headwater plan`. Must
not: hold a figure that was not measured, or answer without saying how far it is from what was.

Times in ms, measured at a client or told by the server's own records:

  service(new, cached) = a + b × new + c × pairs   pairs: millions of (new token, token before it)
  step(batch, context) = s0 + s1 × batch + s2 × batch² + s3 × batch × context / 1000
  hand-over(blocks)    = h0 + h1 × blocks

overhead: what a first token needs besides its prefill (HTTP, tokenising, the way back); it keeps no
worker busy. Without the server's records it cannot be told apart, and is taken as service.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadtests.planner.fits import FitError, Point, error_of, predicted, solve

FORMAT = "headwater-profile/2"
PAIRS = 1e6
TRUST_MOST = 0.10
"""Above this error of a validation, the plan says that it should not be trusted."""


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A prompt of `new` tokens after `cached` ones. ms: TTFT less overhead, median of n."""

    new: int
    cached: int
    ms: float
    n: int


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A decode step with `batch` streams of `context` tokens each: the middle of n gaps."""

    batch: int
    context: int
    ms: float
    n: int


@dataclass(frozen=True, slots=True)
class HandoverPoint:
    """From the first token of a prefill worker to the second, of a decode worker, a step apart."""

    blocks: int
    ms: float
    n: int


@dataclass(frozen=True, slots=True)
class Contention:
    """How roles slow each other down at one number of streams, as factors; 1: they share nothing.

    prefill: of the prefill service while `streams` decode elsewhere. step: of a decode step of
    these while another worker computes a prompt.
    """

    prefill: float = 1.0
    step: float = 1.0
    streams: int = 0
    n: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """Blocks on their way, by the workers' own records; bytes/s, 0 where nothing was moved.

    what: whether they were copied within a node, or pulled from another.
    """

    publish_bytes_per_s: float = 0.0
    load_bytes_per_s: float = 0.0
    block_bytes: int = 0
    blocks: int = 0
    what: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of a validation (loadtests/planner/validate.py says what is compared with what).

    counts: whether n requests could tell it at all.
    """

    name: str
    formula: float
    played: float
    measured: float
    counts: bool = True

    @property
    def error(self) -> float:
        """Of what was played, relative to what was measured; above 0 where it was too high."""
        return (self.played - self.measured) / self.measured

    @property
    def formula_error(self) -> float:
        """Of the formula, which knows the rate and not the arrivals."""
        return (self.formula - self.measured) / self.measured


@dataclass(frozen=True, slots=True)
class Validation:
    """A load that was predicted and then run; load: with its layout; n: requests measured."""

    load: str
    at: str
    n: int
    figures: tuple[Compared, ...]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> Compared:
        """The figure that was predicted worst, of those that count."""
        counting = [figure for figure in self.figures if figure.counts]
        return max(counting, key=lambda figure: abs(figure.error))


@dataclass(frozen=True)
class Profile:
    """One model on one kind of worker.

    colocated: the server does not tell apart prefill and decode (a plain engine). slots: requests
    that one worker has in a step; step_tokens: that it computes in one at most; kv_tokens: that its
    KV cache holds; 0 where not known. contention: by rising streams.
    conditions: under which it was measured; a plan for others is a guess.
    """

    model: str
    at: str
    conditions: dict[str, Any]
    prefill: tuple[PrefillPoint, ...]
    steps: tuple[StepPoint, ...]
    handover: tuple[HandoverPoint, ...] = ()
    overhead_ms: float = 0.0
    colocated: bool = False
    slots: int = 0
    step_tokens: int = 0
    kv_tokens: int = 0
    block_tokens: int = 0
    contention: tuple[Contention, ...] = ()
    link: Link = field(default_factory=Link)
    validations: tuple[Validation, ...] = ()

    # ---- what the fits say ----------------------------------------------------------------------

    def service_ms(self, new: float, cached: float) -> float:
        """A prompt's stay at a worker that has nothing else to do."""
        return predicted(self._prefill_fit, prefill_terms(new, cached))

    def beside(self, streams: float) -> tuple[float, float]:
        """Factors of a prefill and of a decode step, where both go on at once.

        In a line between the points, level beyond them; without streams a prefill has no company,
        while a step of few streams has as much of it as one of more.
        """
        if not self.contention:
            return 1.0, 1.0
        first = self.contention[0]
        points = [Contention(step=first.step), *self.contention]
        for low, high in pairwise(points):
            if streams < high.streams:
                share = (streams - low.streams) / (high.streams - low.streams)
                return (
                    low.prefill + share * (high.prefill - low.prefill),
                    low.step + share * (high.step - low.step),
                )
        return points[-1].prefill, points[-1].step

    @property
    def token_ms(self) -> float:
        """One more prompt token, attention apart."""
        return self._prefill_fit[1]

    @property
    def pairs_ms(self) -> float:
        """A million pairs more."""
        return self._prefill_fit[2]

    def step_ms(self, batch: float, context: float) -> float:
        """One decode step."""
        return predicted(self._step_fit, step_terms(batch, context))

    def handover_ms(self, blocks: float) -> float:
        """On top of a step; 0 where no hand-over was measured."""
        if not self.handover:
            return 0.0
        return predicted(self._handover_fit, (1.0, blocks))

    @cached_property
    def _prefill_fit(self) -> tuple[float, ...]:
        return solve(self._prefill_points())

    @cached_property
    def _step_fit(self) -> tuple[float, ...]:
        return solve(self._step_points())

    @cached_property
    def _handover_fit(self) -> tuple[float, ...]:
        return solve(self._handover_points())

    def _prefill_points(self) -> list[Point]:
        return [Point(prefill_terms(p.new, p.cached), p.ms, p.n) for p in self.prefill]

    def _step_points(self) -> list[Point]:
        return [Point(step_terms(p.batch, p.context), p.ms, p.n) for p in self.steps]

    def _handover_points(self) -> list[Point]:
        return [Point((1.0, p.blocks), p.ms, p.n) for p in self.handover]

    def fit_errors(self) -> dict[str, FitError]:
        """By what is fitted."""
        return {
            "prefill": error_of(self._prefill_points()),
            "step": error_of(self._step_points()),
            "hand-over": error_of(self._handover_points()),
        }

    def fit_lines(self) -> list[str]:
        """Each fit with its coefficients, its points and its error."""
        a, b, c = self._prefill_fit
        s0, s1, s2, s3 = self._step_fit
        errors = self.fit_errors()
        prefill = f"{a:.1f} ms + {b:.3f} ms a new token + {c:.1f} ms a million pairs of tokens"
        step = (
            f"{s0:.1f} ms + {s1:.2f} ms a stream + {s2:.3f} ms × streams² + {s3:.2f} ms a stream "
            "and 1,000 tokens of its context"
        )
        lines = [
            f"prefill: {prefill}; {_counts(self.prefill)}; {errors['prefill'].words()}",
            f"decode step: {step}; {_counts(self.steps)}; {errors['step'].words()}",
        ]
        if self.handover:
            h0, h1 = self._handover_fit
            lines.append(
                f"hand-over: {h0:.1f} ms + {h1:.2f} ms a block; {_counts(self.handover)}; "
                f"{errors['hand-over'].words()}"
            )
        return lines

    # ---- how far it can be trusted --------------------------------------------------------------

    def outside(self, *, new: float, batch: float, context: float) -> list[str]:
        """What of a question lies beyond anything that was measured."""
        news = max(point.new + point.cached for point in self.prefill)
        batches = max(point.batch for point in self.steps)
        contexts = max(point.context for point in self.steps)
        found = []
        for name, asked, most in (
            ("prompts of", new, news),
            ("batches of", batch, batches),
            ("contexts of", context, contexts),
        ):
            if asked > 1.1 * most:
                found.append(f"{name} {asked:,.0f} (measured up to {most:,})")
        return found

    def trust_lines(self) -> list[str]:
        """What validations said; printed with every answer."""
        if not self.validations:
            return [
                (
                    "Confidence: none yet: no prediction of this profile was held against a "
                    "measurement (headwater plan --validate does it)"
                )
            ]
        lines = []
        for one in self.validations:
            worst = one.worst
            lines.append(
                f"Validated {one.at}, {one.load}, n = {one.n}: worst error "
                f"{worst.name}, {worst.error:+.1%}"
            )
        most = max(abs(one.worst.error) for one in self.validations)
        if most > TRUST_MOST:
            lines.append(
                f"Confidence: low. This profile's predictions were off by up to {most:.0%}, above "
                f"{TRUST_MOST:.0%}: DO NOT TRUST this answer beyond that"
            )
        else:
            lines.append(f"Confidence: good near these loads; errors were at most {most:.1%}")
        return lines

    def validated(self, found: Validation) -> Profile:
        """With one more; an older one of the same load is replaced."""
        others = tuple(one for one in self.validations if one.load != found.load)
        return replace(self, validations=(*others, found))

    # ---- as a file ------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """One JSON file, written at once."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    def as_json(self) -> dict[str, Any]:
        """Fits and fit_errors are for readers; they are computed anew when it is read."""
        return {
            "format": FORMAT,
            **asdict(self),
            "fits": {
                "prefill_ms": self._prefill_fit,
                "step_ms": self._step_fit,
                "handover_ms": self._handover_fit if self.handover else None,
            },
            "fit_errors": {name: asdict(error) for name, error in self.fit_errors().items()},
        }

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Raises ValueError where the file is no profile of this format, naming what is wrong."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
                raise ValueError(f"{path} has no format {FORMAT!r}: it is not a profile")
            for derived in ("fits", "fit_errors"):
                data.pop(derived, None)
            found = cls(
                **{
                    **data,
                    "prefill": tuple(PrefillPoint(**one) for one in data["prefill"]),
                    "steps": tuple(StepPoint(**one) for one in data["steps"]),
                    "handover": tuple(HandoverPoint(**one) for one in data["handover"]),
                    "contention": tuple(Contention(**one) for one in data["contention"]),
                    "link": Link(**data["link"]),
                    "validations": tuple(_validation(one) for one in data["validations"]),
                }
            )
        except OSError as gone:
            raise ValueError(f"{path} cannot be read: {gone.strerror}") from gone
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as odd:
            raise ValueError(f"{path} is not a profile: {odd}") from odd
        if not found.prefill or not found.steps:
            raise ValueError(f"{path} has no points of prefill or of decode steps")
        return found


def prefill_terms(new: float, cached: float) -> tuple[float, float, float]:
    """As the router counts them (router/cost.py)."""
    return 1.0, new, new * (cached + new / 2) / PAIRS


def step_terms(batch: float, context: float) -> tuple[float, float, float, float]:
    """A step reads the weights once, and each stream's context.

    The square is for what grows faster than the batch: where streams share cores with the front
    end, or a batch outgrows a cache or a kernel.
    """
    return 1.0, batch, batch**2, batch * context / 1e3


def _counts(points: Sequence[PrefillPoint | StepPoint | HandoverPoint]) -> str:
    return f"{len(points)} points, n = {sum(point.n for point in points)}"


def _validation(data: dict[str, Any]) -> Validation:
    return Validation(
        **{
            **data,
            "figures": tuple(Compared(**one) for one in data["figures"]),
            "notes": tuple(data["notes"]),
        }
    )
