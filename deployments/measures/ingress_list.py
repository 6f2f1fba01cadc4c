"""The metrics of an ingress; all have the label model. Read by ingress/metrics, request_metrics."""

from __future__ import annotations

from deployments.flow.flow_types import Outcome, Stage
from deployments.flow.shadow_audit import AuditOutcome
from deployments.measures.metric import MODEL, RATIOS, SECONDS, TOKEN_SECONDS, Kind, Metric

OUTCOMES = tuple(outcome.value for outcome in Outcome)
PARTS = ("tokenise", "queue", "prefill", "publish", "handover", "delivery")
SOURCES = ("engine", "slab", "other_node", "unreported")
FAULTS = (
    *("no_worker", "poison_request", "attempts_exhausted", "rejected_by_engine"),
    "engine_gave_up",
)
DEGRADATIONS = ("directory", "link_refused", "stalled", "agent", "role_missing", "audit", "keys")
KEY_REFUSALS = ("missing", "unknown", "forbidden", "unclear", "requests", "tokens", "concurrent")
EVENTS = ("handover", "resume", "move", "role_fallback", "late_output")
WORKER_STATES = ("ready", "stalled", "draining", "refused", "connecting")
ROLES = ("prefill", "decode")


def _metric(
    name: str,
    kind: Kind,
    meaning: str,
    bounds: tuple[float, ...] = (),
    /,
    **labels: tuple[str, ...] | str,
) -> Metric:
    return Metric(f"headwater_{name}", kind, meaning, {"model": MODEL, **labels}, bounds)


RECEIVED = _metric(
    "requests_received_total",
    "counter",
    "Requests that came in: one a choice; one an HTTP request of which no choice was made, counted "
    "when it is over. Equal to headwater_requests_total and those in flight.",
)
ENDED = _metric(
    "requests_total",
    "counter",
    "Requests that ended, by outcome: one a choice; one an HTTP request that had none.",
    outcome=OUTCOMES,
)
FAULTED = _metric(
    "request_faults_total",
    "counter",
    "Choices that ended refused or failed, by why; of an HTTP request without one see "
    "headwater_http_refusals_total.",
    reason=FAULTS,
)
REFUSALS = _metric(
    "http_refusals_total",
    "counter",
    "HTTP requests refused before an engine request was made, by status.",
    status="HTTP's: ours and vLLM's answers below 500, and 503",
)
IN_FLIGHT = _metric(
    "requests_in_flight",
    "gauge",
    "Requests by the stage they are in; parked ones wait for a worker.",
    stage=tuple(stage.value for stage in Stage),
)
ADMITTED = _metric("admission_requests", "gauge", "HTTP requests that admission has let in.")
ADMISSION_LIMIT = _metric(
    "admission_limit_requests",
    "gauge",
    "HTTP requests that may be in at once: the workers' slots and the queue; more get 429.",
)
TTFT = _metric(
    "ttft_seconds",
    "histogram",
    "Time to first token: HTTP request received until its first token's bytes leave for the client "
    "(streams), or until the ingress has the token (answers in one piece). Each choice once.",
    SECONDS,
)
TTFT_PARTS = _metric(
    "ttft_part_seconds",
    "histogram",
    "TTFT in parts that add up to it. tokenise: received until tokens are known. queue: in the "
    "worker's queue, loads of cached blocks included, and waiting for a worker. prefill: "
    "computing. publish: until the node agent has the blocks. handover: attempts lost before the "
    "first token. delivery: link, detokenising, first byte.",
    SECONDS,
    part=PARTS,
)
FIRST_TOKENS = _metric(
    "first_tokens_total", "counter", "Choices whose first token was delivered, as in TTFT."
)
FIRST_TOKEN_SECONDS = _metric(
    "first_token_seconds_total",
    "counter",
    "TTFT of these by part, in all: over headwater_first_tokens_total it is the mean. Exact; the "
    "histograms' sums are Ray's guess from the middles of buckets.",
    part=PARTS,
)
TPOT = _metric(
    "tpot_seconds",
    "histogram",
    "Time per output token of a finished choice: (last token - first token) / (tokens - 1), at the "
    "ingress; choices of one token have none.",
    TOKEN_SECONDS,
)
ITL = _metric(
    "itl_seconds",
    "histogram",
    "Inter-token latency: every gap between two outputs of a choice as they reach the ingress, "
    "hand-overs and resumes included; several tokens in one output are one gap. Above 1,000 gaps a "
    "second a random 1,000 of them: the buckets' shares hold, count and sum do not.",
    TOKEN_SECONDS,
)
E2E = _metric(
    "e2e_seconds",
    "histogram",
    "HTTP request received until a choice ended, by outcome: every choice once.",
    SECONDS,
    outcome=OUTCOMES,
)
TTFT_PREDICTED = _metric(
    "ttft_predicted_seconds",
    "histogram",
    "The router's prediction, from tokens known to first token at the ingress, of choices that the "
    "predicted worker served.",
    SECONDS,
)
TTFT_RATIO = _metric(
    "ttft_measured_over_predicted_ratio",
    "histogram",
    "Measured over predicted time from tokens known to first token at the ingress, of the same "
    "choices; above 1 the router was too hopeful.",
    RATIOS,
)
PROMPT_TOKENS = _metric(
    "prompt_tokens_total",
    "counter",
    "Prompt tokens of choices that ended: a prompt with n choices counts n times.",
    outcome=OUTCOMES,
)
OUTPUT_TOKENS = _metric(
    "output_tokens_total",
    "counter",
    "Tokens that the ingress got for choices that ended; a client that left, or a stop string, may "
    "have been sent fewer.",
    outcome=OUTCOMES,
)
CACHED_TOKENS = _metric(
    "cached_tokens_total",
    "counter",
    "Prompt tokens that were not computed, by where they were: the engine's own prefix cache, its "
    "node's slab, another node's slab; unreported: one of the slabs, but the attempt was lost. By "
    "the engine that made the first token, as in usage; counted when the choice ends.",
    source=SOURCES,
)
FALLBACKS = _metric(
    "router_fallbacks_total",
    "counter",
    "Decisions that had to leave cached blocks out of account, by reason.",
    reason=("no_hashes", "engine_in_doubt", "slab_in_doubt"),
)
FLOW_EVENTS = _metric(
    "flow_events_total",
    "counter",
    "Hand-overs, resumes after a lost worker, moves from one that Serve took away (or while this "
    "ingress itself had stood still), role fallbacks, late outputs dropped.",
    kind=EVENTS,
)
AUDITS = _metric(
    "audits_total",
    "counter",
    "Shadow audits by outcome: a request run again without reuse, and compared.",
    outcome=tuple(outcome.value for outcome in AuditOutcome),
)
INDEX_EVICTIONS = _metric(
    "router_index_evictions_total",
    "counter",
    "Blocks that the router's index dropped to stay within its bound.",
)
INDEX_BLOCKS = _metric("router_index_blocks", "gauge", "Distinct blocks in the router's index.")
DIGESTS = _metric(
    "directory_digests_total",
    "counter",
    "Digests of writers compared with the router's index, by outcome.",
    outcome=("equal", "differs"),
)
DOUBTS = _metric(
    "directory_degraded_total",
    "counter",
    "Times that a writer's blocks stopped counting until its snapshot, by reason.",
    reason="kvcache/directory.py: gap, digest, incarnation and their like",
)
DIRECTORY_AGE = _metric(
    "directory_age_seconds",
    "gauge",
    "Since the directory's stream last answered (it answers at least every 10 s); while it does "
    "not, since it last did.",
)
DIRECTORY_SOURCES = _metric(
    "directory_sources",
    "gauge",
    "Slabs and engines in the router's index, by whether what they hold is known exactly.",
    freshness=("exact", "degraded"),
)
WORKERS = _metric(
    "workers",
    "gauge",
    "Workers as this ingress sees them.",
    role=ROLES,
    state=WORKER_STATES,
)
DEGRADED = _metric(
    "degraded",
    "gauge",
    "1 while something works less well than it should, by what it is.",
    what=DEGRADATIONS,
)
REFUSED_BY_KEYS = _metric(
    "key_refusals_total",
    "counter",
    "HTTP requests that went no further than the gate of API keys, by reason. Those for tokens are "
    "refused ones in headwater_requests_total, and but for a key's own limits in "
    "headwater_http_refusals_total.",
    reason=KEY_REFUSALS,
)
KEYS = _metric(
    "keys",
    "gauge",
    "API keys in force, by what they open; none at all while everything is open. The operator's "
    "key that the cluster's secret makes is one.",
    scope=("api", "operator"),
)
KEYS_FAILURES = _metric(
    "keys_file_failures_total",
    "counter",
    "Times that the file of API keys was found unusable; the last good keys stay in force, and "
    'headwater_degraded{what="keys"} is 1, until it is mended.',
)
INGRESS_CPU = _metric(
    "ingress_cpu_seconds_total", "counter", "CPU time of the ingress's process, all its threads."
)
LOOP_LATE = _metric(
    "ingress_loop_late_seconds_total",
    "counter",
    "How late the ingress's event loop ran what was due once a second.",
)

METRICS: tuple[Metric, ...] = (
    *(RECEIVED, ENDED, FAULTED, REFUSALS, IN_FLIGHT, ADMITTED, ADMISSION_LIMIT),
    *(TTFT, TTFT_PARTS, FIRST_TOKENS, FIRST_TOKEN_SECONDS),
    *(TPOT, ITL, E2E, TTFT_PREDICTED, TTFT_RATIO),
    *(PROMPT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS),
    *(FALLBACKS, FLOW_EVENTS, AUDITS, INDEX_EVICTIONS, INDEX_BLOCKS, DIGESTS, DOUBTS),
    *(DIRECTORY_AGE, DIRECTORY_SOURCES, WORKERS, DEGRADED, INGRESS_CPU, LOOP_LATE),
    *(REFUSED_BY_KEYS, KEYS, KEYS_FAILURES),
)
