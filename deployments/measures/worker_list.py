"""The metrics of a worker (labels model and role) and of a node's slab (model).

Read by workers/worker_metrics and node/slab_metrics.
"""

from __future__ import annotations

from deployments.measures.metric import MODEL, REQUESTS, TOKEN_SECONDS, Kind, Metric
from kvcache.connector.stats import LOAD_FAILURE_REASONS, PULL_FAILURE_REASONS

ROLES = ("prefill", "decode")


def _metric(
    name: str,
    kind: Kind,
    meaning: str,
    bounds: tuple[float, ...] = (),
    /,
    **labels: tuple[str, ...],
) -> Metric:
    return Metric(
        f"headwater_{name}", kind, meaning, {"model": MODEL, "role": ROLES, **labels}, bounds
    )


def _of_slab(name: str, kind: Kind, meaning: str, /, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"headwater_slab_{name}", kind, meaning, {"model": MODEL, **labels})


REQUESTS_NOW = _metric(
    "engine_requests", "gauge", "Requests in the engine now.", state=("running", "waiting")
)
SLOTS = _metric("engine_slots_requests", "gauge", "Requests that the engine runs at once at most.")
QUEUED_TOKENS = _metric(
    "engine_queued_tokens", "gauge", "Tokens to be computed before their requests' next output."
)
KV_BLOCKS = _metric(
    "engine_kv_blocks",
    "gauge",
    "Blocks of the engine's own KV cache; free ones include cached blocks without a user.",
    state=("free", "used"),
)
BATCH = _metric(
    "engine_batch_requests",
    "histogram",
    "Requests in a step that computed; above 1,000 steps a look a random 1,000 of them.",
    REQUESTS,
)
STEP_SECONDS = _metric(
    "engine_step_seconds", "histogram", "Duration of a step that computed; as above.", TOKEN_SECONDS
)
STEPS = _metric("engine_steps_total", "counter", "Steps that computed tokens.")
SCHEDULED = _metric(
    "engine_scheduled_requests_total",
    "counter",
    "Requests summed over these steps: over headwater_engine_steps_total it is the mean batch.",
)
COMPUTED = _metric(
    "engine_computed_tokens_total", "counter", "Tokens computed in steps, of prompts and outputs."
)
GENERATED = _metric("engine_generated_tokens_total", "counter", "Output tokens made.")
PROMPTS = _metric(
    "engine_prompt_tokens_total",
    "counter",
    "Tokens of the prompts whose first token was made here (vLLM's PrefillStats).",
)
CACHED = _metric(
    "engine_cached_tokens_total", "counter", "Of these, tokens that a cache had: vLLM's own count."
)
PREEMPTIONS = _metric(
    "engine_preemptions_total", "counter", "Requests put back for want of KV blocks."
)
BUSY = _metric("engine_busy_seconds_total", "counter", "Time in steps that computed.")
PREFILL_TIME = _metric(
    "engine_prefill_seconds_total",
    "counter",
    "The part of busy time for prompts: a step's time by its tokens, each request's first one "
    "counted as decode.",
)
WAITED = _metric(
    "engine_wait_seconds_total", "counter", "Request-seconds spent in the engine's queue."
)
FLOP = _metric(
    "engine_flop_total",
    "counter",
    "Floating-point operations that the computed tokens need: 2 x weights of all layers x tokens + "
    "2 x weights of the output layer x sampled positions + 4 x layers x heads x head size x pairs "
    "of a token and one before it. Computed from shapes, not measured; its rate is achieved "
    "FLOP/s. Of experts, those that a token uses.",
)
MEMORY = _metric(
    "engine_memory_bytes_total",
    "counter",
    "Bytes that steps must move: all weights once a step + KV of each scheduled request's whole "
    "context read once a step + KV of its new tokens written. Computed from shapes, activations "
    "left out; its rate is achieved bytes/s.",
)
CPU = _metric("worker_cpu_seconds_total", "counter", "CPU time of the worker's process.")
CORES = _metric(
    "worker_cpu_cores",
    "gauge",
    "Cores that the worker was given: CPU utilisation is the rate of its CPU seconds over it.",
)
STALLED = _metric("engine_stalled_seconds", "gauge", "Since the engine's loop last turned.")
LOAD_FAILURES = _metric(
    "kv_load_failures_total",
    "counter",
    "Loads of KV blocks that failed, by the first block's reason; the rest is recomputed.",
    reason=LOAD_FAILURE_REASONS,
)
RECOMPUTED = _metric(
    "kv_blocks_recomputed_total",
    "counter",
    "Blocks that a failed load did not bring, so that the engine computed them.",
)
PULL_FAILURES = _metric(
    "kv_pull_failures_total",
    "counter",
    "Look-ups at another node without an answer, and pulls from it that ended early.",
    reason=PULL_FAILURE_REASONS,
)
STORE_FAILURES = _metric(
    "kv_store_failures_total",
    "counter",
    "Publications that failed or were not acknowledged; blocks refused or without room.",
    reason=("failed", "timed_out", "refused", "no_room", "no_agent"),
)
WAYS = ("loaded", "pulled", "published")
BLOCKS = _metric(
    "kv_blocks_total",
    "counter",
    "Blocks loaded (those pulled from other nodes included), pulled and published.",
    way=WAYS,
)
TRANSFER_BYTES = _metric(
    "kv_transfer_bytes_total",
    "counter",
    "Bytes of these blocks; loaded ones include pulled ones.",
    way=WAYS,
)
TRANSFER_SECONDS = _metric(
    "kv_transfer_seconds_total",
    "counter",
    "Time that loads, pulls and publications took, side by side ones added up; bytes over it are "
    "the speed of one.",
    way=WAYS,
)
LOADS_NOW = _metric("kv_loads_in_progress", "gauge", "Loads of KV blocks on their way.")
STAGING = _metric(
    "kv_staging_slots",
    "gauge",
    "Staging slots for blocks of other nodes; quarantined: something may still write to them.",
    state=("usable", "quarantined"),
)

SLAB_STATES = ("free", "filling", "quarantined", "published", "retired")
SLAB_SLOTS = _of_slab(
    "slots", "gauge", "Slots of the node's slab, one a block, by state.", state=SLAB_STATES
)
SLAB_LEASED = _of_slab("leased_slots", "gauge", "Slots that some lease holds.")
SLAB_LEASES = _of_slab("leases", "gauge", "Leases that are open now.")
LEASE_EVENTS = _of_slab(
    "lease_events_total",
    "counter",
    "opened - ended = open now; expired and replaced are among ended, taken are hand-offs that a "
    "decode worker took over, orphaned those whose worker died, refused had no room in the book.",
    event=("opened", "ended", "expired", "replaced", "refused", "taken", "orphaned"),
)
SLAB_EVICTED = _of_slab("evictions_total", "counter", "Published blocks evicted for room.")

METRICS: tuple[Metric, ...] = (
    *(REQUESTS_NOW, SLOTS, QUEUED_TOKENS, KV_BLOCKS, BATCH, STEP_SECONDS, STEPS),
    *(
        SCHEDULED,
        COMPUTED,
        GENERATED,
        PROMPTS,
        CACHED,
        PREEMPTIONS,
        BUSY,
        PREFILL_TIME,
        WAITED,
        FLOP,
        MEMORY,
    ),
    *(CPU, CORES, STALLED, LOAD_FAILURES, RECOMPUTED, PULL_FAILURES, STORE_FAILURES, BLOCKS),
    *(TRANSFER_BYTES, TRANSFER_SECONDS, LOADS_NOW, STAGING),
    *(SLAB_SLOTS, SLAB_LEASED, SLAB_LEASES, LEASE_EVENTS, SLAB_EVICTED),
)
