"""Messages on the link between an ingress and a worker, and their framing.

A frame is a little-endian u32 length and a msgpack array whose first element names the message.
Nothing is pickled. Requests and step outputs are opaque bytes here: vLLM's own msgpack structs,
made and read by deployments/engine/codec. Called by link.py and link_server.py. DESIGN D3.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import struct

import msgspec

from deployments.errors import LinkError

FRAME_BYTES_BEFORE_AUTH = 4096
FRAME_BYTES_MAX = 256 << 20
# The largest HTTP body whose request still fits. Bad words grow most, to seven times: they travel
# as text, and twice as tokens of up to three bytes each. A prompt's tokens are 5 MiB at most.
REQUEST_BODY_BYTES_MAX = FRAME_BYTES_MAX // 8
PROTOCOL_VERSION = 1
NONCE_BYTES = 32
_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Ingress to worker, first. ``nonce`` is 32 random bytes."""

    version: int
    ingress: str
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Worker to ingress: its nonce, and its proof that it knows the cluster's secret."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Ingress to worker: its own proof, and the namespace that it expects (identity, not order)."""

    proof: bytes
    namespace: dict[str, str]


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Worker to ingress: who it is.

    ``namespace``: all that the workers of a model must have in common (the identity of their
    blocks, and max_model_len), as text, to name a differing field. ``slots`` and
    ``step_tokens_max``: requests and tokens that one engine step may have; 0: not told. ``slow``:
    why this node cannot serve the configured settings well; empty where it can.
    """

    worker: str
    incarnation: str
    model: str
    role: str
    node: str
    pid: int
    namespace: dict[str, str]
    slots: int
    queue_max: int
    machine: str = ""
    step_tokens_max: int = 0
    slow: str = ""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Either side: the link is refused for this reason; the connection closes."""

    reason: str


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Ingress to worker: run this attempt.

    ``request`` is an encoded EngineCoreRequest whose id is the attempt's. ``resume_tokens`` are
    output tokens that exist already. ``handoff`` is the key of the lease under which prefill
    leaves the blocks (role prefill) or under which they are found (role decode). ``pull_from`` is
    where the slab of another node is read that has blocks of it ("host:port"); empty: none.
    ``is_audit``: nothing of it is published or counted among the users' prompts.
    """

    attempt: str
    role: str
    request: bytes
    resume_tokens: list[int]
    handoff: str | None
    pull_from: str = ""
    is_audit: bool = False


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Ingress to worker: stop these attempts."""

    attempts: list[str]


class EndHandoffs(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Ingress to worker: release these hand-off leases, nobody will take them over."""

    handoffs: list[str]


class Prefetch(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Ingress to worker: a hand-off for you begins on another node; take its blocks as they come.

    ``hashes`` are those of the prompt's full blocks, ``pull_from`` as in Submit. The attempt that
    takes the hand-off over follows, or EndHandoffs.
    """

    handoff: str
    hashes: list[bytes]
    pull_from: str


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Durations in seconds up to an attempt's first token, on the worker's clock."""

    attempt: str
    queue_s: float
    compute_s: float
    publish_s: float


class Load(msgspec.Struct, frozen=True, array_like=True):
    """The worker's whole load (all ingresses), carried by every Outputs and Ping.

    steps: so many computed tokens; turns that wait for blocks on their way are none.
    step_ms, step_tokens, step_pairs, batch: duration, computed tokens, pairs of one of them and
    one before it, and requests of the last step.
    prompt_tokens_total, cached_tokens_total: of the prompts whose first token was made here, and of
    these what a cache had (vLLM's PrefillStats).
    stalled_s: seconds since the engine's loop last turned, when this was sent. The rest is the
    engine thread's word at that turn; this is the event loop's, which also answers pings.
    slab_peer: where other nodes read the slab of the worker's node ("host:port"); empty: they
    cannot. Here, not in Welcome: an agent that starts anew has another port, and the link goes on.
    blocks_loaded_total includes blocks_pulled_total: those from other nodes' slabs.
    kv_copies: the way of a block's bytes between engine and slab; slot_bytes: a block's bytes.

    Seconds in total, up to clock_s, the engine thread's clock at that turn. busy: in steps that
    computed. prefill: the part of these for prompts; a step's time goes by its tokens, of which
    each request's first counts as decode. short: in steps before which a request got no KV blocks.
    full: while requests waited and all slots ran. loading: while blocks were on their way.
    Request-seconds: wait, in the engine's queue, and load_wait, for blocks on their way.
    """

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    steps: int = 0
    step_ms: float = 0.0
    step_tokens: int = 0
    step_pairs: float = 0.0
    batch: int = 0
    generated_tokens_total: int = 0
    computed_tokens_total: int = 0
    preemptions_total: int = 0
    blocks_published_total: int = 0
    blocks_loaded_total: int = 0
    load_failures_total: int = 0
    degraded: str = ""
    stalled_s: float = 0.0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    slab_peer: str = ""
    blocks_pulled_total: int = 0
    kv_copies: str = ""
    slot_bytes: int = 0
    clock_s: float = 0.0
    busy_s_total: float = 0.0
    prefill_s_total: float = 0.0
    short_s_total: float = 0.0
    full_s_total: float = 0.0
    loading_s_total: float = 0.0
    wait_s_total: float = 0.0
    load_wait_s_total: float = 0.0


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Worker to ingress: one engine step (or several, coalesced) for this ingress."""

    outputs: bytes
    timings: list[Timing]
    load: Load


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Worker to ingress: an attempt was not taken."""

    attempt: str
    message: str
    client_fault: bool


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Worker to ingress: an attempt was stopped; ``stage`` is vLLM's request status then."""

    attempt: str
    stage: str
    step: int


class CacheEvents(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Worker to ingress: encoded EventBatch or Snapshot of the engine's own prefix cache."""

    batch: bytes


class Resync(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Ingress to worker: send a snapshot of the engine's prefix cache, batches were missed."""


class AskLedger(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Ingress to worker: say what you hold, for an operator."""


class AttemptHeld(msgspec.Struct, frozen=True):
    """An attempt at a worker. owner: its ingress. status: vLLM's word. age_s: since it came."""

    attempt: str
    owner: str
    status: str
    age_s: float


class LoadHeld(msgspec.Struct, frozen=True):
    """A load of blocks on its way, whose request may have been aborted; lease: the agent's key."""

    request: str
    lease: str
    blocks: int
    aborted: bool
    age_s: float


class StagingHeld(msgspec.Struct, frozen=True):
    """Staging slots for blocks of other nodes; state: "held" or "quarantined"."""

    owner: str
    state: str
    slots: int
    age_s: float


class WorkerLedger(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Worker to ingress: all that it holds for requests, whoever they belong to."""

    attempts: list[AttemptHeld]
    loads: list[LoadHeld]
    staging: list[StagingHeld]
    staging_slots: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Both ways; the peer answers with Pong. A worker's carries its load."""

    load: Load | None = None


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Answer to Ping."""


Message = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | Refused
    | Submit
    | Abort
    | EndHandoffs
    | Prefetch
    | Outputs
    | Rejected
    | Aborted
    | CacheEvents
    | Resync
    | AskLedger
    | WorkerLedger
    | Ping
    | Pong
)
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """One frame, length included. Raises LinkError above FRAME_BYTES_MAX."""
    body = _ENCODER.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        msg = f"frame of {len(body)} bytes; the limit is {FRAME_BYTES_MAX}"
        raise LinkError(msg)
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader, *, bytes_max: int = FRAME_BYTES_MAX) -> Message:
    """Read one frame. Raises LinkError for a closed peer, an oversized or malformed frame."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > bytes_max:
            msg = f"peer sent a frame of {length} bytes; the limit here is {bytes_max}"
            raise LinkError(msg)
        return _DECODER.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError) as ended:
        raise LinkError("peer closed the connection") from ended
    except (msgspec.DecodeError, RecursionError) as bad:
        msg = f"peer sent a malformed frame: {bad}"
        raise LinkError(msg) from bad


def proof(secret: bytes, side: str, ingress_nonce: bytes, worker_nonce: bytes) -> bytes:
    """HMAC-SHA256 over both nonces; ``side`` keeps one side's proof from serving as the other's."""
    return hmac.digest(secret, side.encode() + ingress_nonce + worker_nonce, hashlib.sha256)


def proof_is_right(given: bytes, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given, expected)
