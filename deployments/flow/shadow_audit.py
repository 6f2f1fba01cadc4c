"""Shadow audits: a share of the requests that reused KV blocks is run again without, and compared.

Names, generations and checksums vouch for a block's bytes as they were published. Whether these
were the right ones, only the model itself can tell: an audit computes the whole prompt anew, on an
idle worker, reading no cache and publishing nothing, and compares token by token.

A core without I/O: events are calls with ``now_s``, answers are effects. Called by audit_runs.
It must never hurt a user: one audit at a time, on a worker that has nothing else to do, given up
as soon as a request is sent there; nothing of it is in records, outcomes or the router's books.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from deployments.flow.flow_types import AbortAttempt, Intake, Outcome
from deployments.flow.request_record import RequestRecord

log = logging.getLogger("headwater.audit")

ATTEMPT_PREFIX: Final = "audit~"
BLOCKS_LOGGED_MAX: Final = 64
FOUND_MAX: Final = 16  # disagreements that are kept for `status`


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """Which requests are audited, and how far an audit may go.

    Attributes:
        share: of the requests that can be audited, the part that is; 0: none.
        tokens_max: longest prompt with its output; longer ones are not audited.
        output_tokens_max: output tokens that are compared, from the first on.
        waiting_max, wait_s: how many wait for an idle worker, and for how long.
        run_s: how long one may take.
        tie_nats: where the audit's own log probability of the client's token is less than this
            below that of its choice, the two were as good as equal: a tie, no alarm. It depends on
            the model's dtype: see tie_nats_of.

    """

    share: float = 0.0
    tokens_max: int = 8192
    output_tokens_max: int = 256
    waiting_max: int = 8
    wait_s: float = 300.0
    run_s: float = 120.0
    tie_nats: float = 0.5


class AuditOutcome(StrEnum):
    """How an audit ended."""

    AGREED = "agreed"  # all compared tokens are equal
    TIED = "tied"  # equal up to a place where two tokens were as good as equal
    DISAGREED = "disagreed"
    UNFINISHED = "unfinished"  # no worker was idle for long enough, or one was lost


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished request to audit. blocks: names of the prompt's blocks that it reused."""

    request_id: str
    trace_id: str
    payload: object
    tokens: tuple[int, ...]
    blocks: tuple[bytes, ...]
    finished_s: float


@dataclass(frozen=True, slots=True)
class StartAudit:
    """Effect: compute ``output_tokens`` tokens of this prompt at a worker, without any reuse."""

    worker: str
    attempt: str
    payload: object
    output_tokens: int


@dataclass(frozen=True, slots=True)
class AuditStep:
    """New tokens of an audit; for each the log probabilities of the likeliest tokens, by id.

    is_last: the engine has ended it.
    """

    tokens: Sequence[int]
    logprobs: Sequence[Mapping[int, float]]
    is_last: bool


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Reused KV gave another token than the model gives: ``got``, not ``wanted``, at ``place``."""

    trace_id: str
    place: int
    got: int
    wanted: int
    gap_nats: float
    blocks: tuple[str, ...]


@dataclass(slots=True)
class _Run:
    sample: Sample
    worker: str
    attempt: str
    started_s: float
    compared: int = 0


AuditEffect = StartAudit | AbortAttempt


class ShadowAudits:
    """The audits of one ingress. Not thread-safe: one event loop owns it."""

    def __init__(
        self, settings: AuditSettings, block_size: int, is_comparable: Callable[[object], bool]
    ) -> None:
        """is_comparable(payload): its tokens follow from the model alone, and can be judged."""
        self.settings = settings
        self.outcomes: dict[AuditOutcome, int] = dict.fromkeys(AuditOutcome, 0)
        self.started_total = 0
        self.found: deque[Disagreement] = deque(maxlen=FOUND_MAX)
        self._block_size = block_size
        self._is_comparable = is_comparable
        self._waiting: deque[Sample] = deque()
        self._run: _Run | None = None

    # ---- which requests ---------------------------------------------------------------------

    def consider(self, intake: Intake, record: RequestRecord, tokens: Sequence[int]) -> None:
        """A request has ended: perhaps keep it for an audit. Mutates."""
        settings = self.settings
        if not is_sampled(intake.request_id, settings.share) or not tokens:
            return
        if record.outcome is not Outcome.FINISHED:
            return
        assert record.ended_s is not None
        length = intake.prompt_tokens + len(tokens)
        reused = reused_tokens(record)
        if not reused or length > settings.tokens_max or not self._is_comparable(intake.payload):
            return
        if len(self._waiting) >= settings.waiting_max:
            self.outcomes[AuditOutcome.UNFINISHED] += 1
            return
        blocks = intake.block_hashes[: -(-reused // self._block_size)]
        compared = tuple(tokens[: settings.output_tokens_max])
        ids = (intake.request_id, intake.trace_id)
        self._waiting.append(Sample(*ids, intake.payload, compared, blocks, record.ended_s))

    # ---- when, and where --------------------------------------------------------------------

    def tick(self, load: Mapping[str, int], now_s: float, *, users: int) -> list[AuditEffect]:
        """Call about twice a second. load: requests at each worker that takes work, by its word.

        users: requests in flight at this ingress.
        """
        effects: list[AuditEffect] = []
        run = self._run
        if run is not None:
            # Its own request is one; where the worker has not told of it yet, none.
            if load.get(run.worker, 2) > 1:
                effects += self._give_up(again=True)
            elif now_s - run.started_s > self.settings.run_s:
                effects += self._give_up(again=False)
        while self._waiting and now_s - self._waiting[0].finished_s > self.settings.wait_s:
            self._waiting.popleft()
            self.outcomes[AuditOutcome.UNFINISHED] += 1
        idle = [worker for worker, requests in load.items() if not requests]
        if self._run is None and not effects and self._waiting and idle and not users:
            effects.append(self._start(idle, now_s))
        return effects

    def _start(self, idle: Sequence[str], now_s: float) -> StartAudit:
        sample = self._waiting.popleft()
        self.started_total += 1
        worker = idle[self.started_total % len(idle)]
        attempt = f"{ATTEMPT_PREFIX}{sample.request_id}~{self.started_total}"
        self._run = _Run(sample, worker, attempt, now_s)
        return StartAudit(worker, attempt, sample.payload, len(sample.tokens))

    def user_goes_to(self, worker: str) -> list[AuditEffect]:
        """A request is about to be sent to that worker: an audit there ends first."""
        run = self._run
        return self._give_up(again=True) if run is not None and run.worker == worker else []

    def worker_lost(self, worker: str) -> None:
        """Nothing comes from it any more; it may have been the audit that it died of."""
        if self._run is not None and self._run.worker == worker:
            self._end(AuditOutcome.UNFINISHED)

    def rejected(self, attempt: str) -> None:
        """The worker did not take it."""
        if self._run is not None and self._run.attempt == attempt:
            self._end(AuditOutcome.UNFINISHED)

    def _give_up(self, *, again: bool) -> list[AuditEffect]:
        run = self._run
        assert run is not None
        if again:
            self._run = None
            self._waiting.appendleft(run.sample)  # it has its place from before, by its age
        else:
            self._end(AuditOutcome.UNFINISHED)
        return [AbortAttempt(run.worker, run.attempt)]

    # ---- the comparison ---------------------------------------------------------------------

    def is_audit(self, attempt: str) -> bool:
        """Whether outputs of that name are ours; costs nothing where none was ever started."""
        return self.started_total > 0 and attempt.startswith(ATTEMPT_PREFIX)

    def outputs(self, attempt: str, step: AuditStep) -> list[AuditEffect]:
        """Tokens of an audit; those of one that was given up are dropped."""
        run = self._run
        if run is None or run.attempt != attempt:
            return []
        wanted = run.sample.tokens
        for token, logprobs in zip(step.tokens, step.logprobs, strict=True):
            if token != wanted[run.compared]:
                self._differs(run, token, logprobs)
                return [] if step.is_last else [AbortAttempt(run.worker, run.attempt)]
            run.compared += 1
            if run.compared == len(wanted):
                self._end(AuditOutcome.AGREED)
                return [] if step.is_last else [AbortAttempt(run.worker, run.attempt)]
        if step.is_last:
            self._end(AuditOutcome.UNFINISHED)
        return []

    def _differs(self, run: _Run, token: int, logprobs: Mapping[int, float]) -> None:
        sample, place = run.sample, run.compared
        got = sample.tokens[place]
        gap = logprobs[token] - logprobs.get(got, float("-inf"))
        if gap < self.settings.tie_nats:
            log.info("audit of %s: token %d was a tie (%.3g nats)", sample.trace_id, place, gap)
            self._end(AuditOutcome.TIED)
            return
        names = tuple(block.hex() for block in sample.blocks)
        self.found.append(Disagreement(sample.trace_id, place, got, token, gap, names))
        more = f" and {len(names) - BLOCKS_LOGGED_MAX} more" if names[BLOCKS_LOGGED_MAX:] else ""
        log.error(
            "audit of %s DISAGREES: with reused KV, output token %d was %d; without, it is %d "
            "(%.3g nats likelier). Blocks reused: %s%s",
            *(sample.trace_id, place, got, token, gap),
            " ".join(names[:BLOCKS_LOGGED_MAX]),
            more,
        )
        self._end(AuditOutcome.DISAGREED)

    def _end(self, outcome: AuditOutcome) -> None:
        self._run = None
        self.outcomes[outcome] += 1

    # ---- what others may ask ----------------------------------------------------------------

    @property
    def running_at(self) -> str | None:
        """The worker that runs an audit now."""
        return None if self._run is None else self._run.worker

    @property
    def waiting(self) -> int:
        """Samples that wait for an idle worker."""
        return len(self._waiting)

    def as_json(self) -> dict[str, Any]:
        """For `/headwater/status`."""
        return {
            "share": self.settings.share,
            "outcomes": {outcome.value: count for outcome, count in self.outcomes.items()},
            "waiting": self.waiting,
            "running_at": self.running_at,
            "disagreements": [asdict(one) for one in self.found],
        }

    def words(self) -> list[str]:
        """What an operator must know, for as long as this ingress lives."""
        count = self.outcomes[AuditOutcome.DISAGREED]
        if not count:
            return []
        last = self.found[-1]
        blocks = f"blocks {last.blocks[0]} and on" if last.blocks else "blocks of its output"
        where = f"last in request {last.trace_id}, {blocks}"
        return [f"reused KV gave other tokens than the model in {count} shadow audits, {where}"]


def tie_nats_of(dtype: str) -> float:
    """What is a tie: twice the largest gap that sound audits were seen to part at, and more.

    Other batches and chunks add the same numbers in another order. In bfloat16 that moves logits by
    a step or two of theirs, 0.125 nats each between 16 and 32: of 112 audits 27 parted, none at
    more than 0.25 nats. In float32 it moves the sixth digit.
    """
    return 0.1 if dtype == "float32" else 0.5


def is_sampled(request_id: str, share: float) -> bool:
    """The same for the same id; request ids are random."""
    if share <= 0.0:
        return False
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2.0**64


def reused_tokens(record: RequestRecord) -> int:
    """Most tokens that one of its attempts found in some cache, as its worker reported."""
    reports = (attempt.kv for attempt in record.attempts if attempt.kv is not None)
    return max((report.local_tokens + report.loaded_tokens for report in reports), default=0)
