"""Events, effects and states of the request flow: plain values, no I/O.

Used by request_flow (the state machine), engine_client (which carries effects out) and the
simulation. Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from typing import Protocol


class Finish(IntEnum):
    """vLLM's FinishReason by value (vllm/v1/engine/__init__.py, 0.32)."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class Role(StrEnum):
    """What a worker was deployed for, and what an attempt does there."""

    PREFILL = "prefill"
    DECODE = "decode"


class Stage(StrEnum):
    """Where a request is now, as seen by the ingress."""

    PARKED = "parked"  # no worker can take it; waits for one, for a bounded time
    PREFILL = "prefill"  # a prefill worker computes the prompt and the first token
    HANDOVER = "handover"  # submitted to a decode worker, no output from it yet
    DECODE = "decode"  # tokens come


class Outcome(StrEnum):
    """How a request ended; each ends exactly once (I4)."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    FAILED = "failed"


class Failure(Enum):
    """Errors that the flow ends a request with: HTTP status, code, and what the client reads."""

    NO_WORKER = (503, "no_worker", "No worker could take this request in time; try again.")
    POISON_REQUEST = (
        422,
        "poison_request",
        "This request met the death of too many workers and is not tried again.",
    )
    ATTEMPTS_EXHAUSTED = (
        503,
        "attempts_exhausted",
        "This request was tried too often; try again later.",
    )
    REJECTED_BY_ENGINE = (
        400,
        "rejected_by_engine",
        "The engine does not accept this request.",
    )

    def __init__(self, status: int, code: str, text: str) -> None:
        self.status = status
        self.code = code
        self.text = text


class StepOutput(Protocol):
    """The part of vLLM's EngineCoreOutput that the flow looks at."""

    request_id: str
    new_token_ids: list[int]

    @property
    def finish_reason(self) -> int | None:
        """Why the attempt ended, or None while it goes on."""


@dataclass(frozen=True, slots=True)
class Intake:
    """A request as it enters the flow.

    Attributes:
        request_id: vLLM's internal id, unique for ever.
        trace_id: the HTTP request it belongs to (n > 1 gives several to one trace).
        block_hashes: chained hashes of the prompt's full blocks, 32 bytes each.
        max_tokens, min_tokens: of the whole answer.
        context_tokens_max: prompt plus output may not exceed it.
        received_s, tokenised_s: when HTTP received it, when its tokens were known.
        payload: opaque to the flow (an EngineCoreRequest); handed back in SubmitAttempt.
        key: the name of the API key that asked, where keys are set.

    """

    request_id: str
    trace_id: str
    model: str
    prompt_tokens: int
    block_hashes: tuple[bytes, ...]
    max_tokens: int
    min_tokens: int
    context_tokens_max: int
    received_s: float
    tokenised_s: float
    payload: object
    priority: int = 0
    key: str = ""


@dataclass(frozen=True, slots=True)
class AttemptTiming:
    """Durations on the worker's clock, sent with an attempt's first output.

    Attributes:
        queue_s: received to first scheduled (a load of cached blocks included).
        compute_s: first scheduled to first token, publishing excluded.
        publish_s: time the step waited for its blocks to be acknowledged by the agent.

    """

    attempt: str
    queue_s: float
    compute_s: float
    publish_s: float


@dataclass(frozen=True, slots=True)
class KvReport:
    """What an attempt did with KV blocks, from its worker at the attempt's end.

    local_tokens: what its engine's own cache had when it was first scheduled.
    loaded includes pulled: what came from another node's slab. pull_failure: why that gave nothing,
    or not all; None where it did, and where it had nothing. prefetched: what had come from there
    before, while prefill computed.
    """

    loaded_blocks: int = 0
    loaded_tokens: int = 0
    published_blocks: int = 0
    failed_blocks: int = 0
    computed_tokens: int = 0
    load_s: float = 0.0
    publish_s: float = 0.0
    lookup_s: float = 0.0
    pulled_blocks: int = 0
    pull_s: float = 0.0
    pull_failure: str | None = None
    prefetched_blocks: int = 0
    local_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SubmitAttempt:
    """Effect: give the request to a worker.

    Attributes:
        resume_tokens: tokens the client has already, as output tokens of this attempt.
        handoff: key of the lease under which prefill leaves the blocks for decode, or finds them.
        pull_from: node whose slab has blocks that the worker's own has not; empty: none.

    """

    worker: str
    attempt: str
    request_id: str
    role: Role
    resume_tokens: tuple[int, ...]
    handoff: str | None
    pull_from: str
    payload: object


@dataclass(frozen=True, slots=True)
class AbortAttempt:
    """Effect: the worker must stop this attempt; its late outputs are dropped."""

    worker: str
    attempt: str


@dataclass(frozen=True, slots=True)
class EndHandoff:
    """Effect: nobody will load these blocks; the hand-off lease ends now, not by deadline."""

    worker: str
    handoff: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Effect: the worker that will decode takes the hand-off's blocks over as they are computed.

    Attributes:
        pull_from: the node where they are.
        block_hashes: of the prompt's full blocks.

    """

    worker: str
    handoff: str
    pull_from: str
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Emit:
    """Effect: pass an output on to the front end; ``finish`` False clears its finish reason."""

    request_id: str
    output: StepOutput
    finish: bool


@dataclass(frozen=True, slots=True)
class Fail:
    """Effect: end the request with an error that the client sees."""

    request_id: str
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


Effect = SubmitAttempt | AbortAttempt | EndHandoff | Prefetch | Emit | Fail


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """Bounds of the flow.

    Attributes:
        parked_max: requests without a token that may wait for a worker to appear; beyond it, 503.
        park_timeout_s: how long one may wait, since it last made progress.
        retry_interval_s: a waiting one tries again this often, and when a worker joins.
        worker_deaths_max: a request that has met this many worker deaths is refused as poison.
        sound_tokens: an attempt that made so many before its worker died was not why it did, nor
            were those before it; deaths are counted from there on.
        attempts_max: attempts per request, those not counted that a worker refused or gave away
            alive; beyond it the request fails.

    """

    parked_max: int = 256
    park_timeout_s: float = 60.0
    retry_interval_s: float = 2.0
    worker_deaths_max: int = 2
    sound_tokens: int = 32
    attempts_max: int = 8


def tokens_left(intake: Intake, tokens: Sequence[int]) -> int:
    """Tokens that may still be generated, from max_tokens and the context limit."""
    by_context = intake.context_tokens_max - intake.prompt_tokens
    return min(intake.max_tokens, by_context) - len(tokens)
