"""The fleet: what is asked of it, who does the work, and what works less well than it should."""

from __future__ import annotations

from cluster.dashboards.panels import Dashboard, Panel, Query, Row, now, per_second, quantile
from deployments.measures import ingress_list as ingress
from deployments.measures import worker_list as worker

_TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Ready workers",
            "By role, as the ingress that sees most of them does. None of a role: its requests go "
            "to the other role, or wait.",
            (
                Query(
                    f"max by (role) ({now(ingress.WORKERS, 'role', 'WorkerId', state='ready')})",
                    "{{role}}",
                ),
            ),
            "none",
            "stat",
            6,
        ),
        Panel(
            "In flight",
            "Choices that are somewhere between tokenised and ended.",
            (Query(now(ingress.IN_FLIGHT), "requests"),),
            "none",
            "stat",
            6,
        ),
        Panel(
            "Admission full",
            "HTTP requests in, over how many may be. At 1 the next one gets 429.",
            (Query(f"{now(ingress.ADMITTED)} / {now(ingress.ADMISSION_LIMIT)}", "full"),),
            "percentunit",
            "stat",
            6,
            silent="no request was ever offered to admission",
        ),
        Panel(
            "Degraded",
            "Kinds of trouble that the ingresses report now; which: the panel below.",
            (
                Query(
                    f"count({now(ingress.DEGRADED, 'what', how='max')} > 0) or vector(0)", "kinds"
                ),
            ),
            "none",
            "stat",
            6,
        ),
        Panel(
            "Requests that ended",
            "By outcome. Failed ones are ours to explain; refused ones were asked for too much, "
            "or came when all was full.",
            (Query(per_second(ingress.ENDED, "outcome"), "{{outcome}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Tokens",
            "Output tokens made, and tokens computed: the difference is prompts that no cache had.",
            (
                Query(per_second(worker.GENERATED), "generated"),
                Query(per_second(worker.COMPUTED), "computed"),
            ),
            "cps",
        ),
        Panel(
            "What works less well",
            "1 while it lasts. The runbook has an entry for each.",
            (Query(now(ingress.DEGRADED, "what", how="max"), "{{what}}"),),
            "none",
        ),
    ),
)
_WORKERS = Row(
    "Workers",
    (
        Panel(
            "Engine busy",
            "Share of time in steps that computed, by role and process. At 1 a worker has no "
            "time left: requests wait.",
            (Query(per_second(worker.BUSY, "role", "WorkerId"), "{{role}} {{WorkerId}}"),),
            "percentunit",
        ),
        Panel(
            "Running and waiting",
            "Requests in the engines. Waiting ones that stay mean too few slots or KV blocks.",
            (Query(now(worker.REQUESTS_NOW, "role", "state"), "{{role}} {{state}}"),),
            "none",
            stacked=True,
        ),
        Panel(
            "Requests in a step",
            "Batch size. Decode gets cheaper a token as it grows.",
            (
                Query(
                    f"{per_second(worker.SCHEDULED, 'role')} / {per_second(worker.STEPS, 'role')}",
                    "{{role}}, mean",
                ),
                Query(quantile(0.95, worker.BATCH, "role"), "{{role}}, p95"),
            ),
            "none",
        ),
        Panel(
            "Step time p95",
            "For decode it is the floor of the time between two tokens.",
            (Query(quantile(0.95, worker.STEP_SECONDS, "role"), "{{role}}"),),
            "s",
        ),
        Panel(
            "CPU used of the cores given",
            "Of each worker's process. On a CPU an engine that is busy uses all of it.",
            (
                Query(
                    f"{per_second(worker.CPU, 'role', 'WorkerId')} / "
                    f"{now(worker.CORES, 'role', 'WorkerId')}",
                    "{{role}} {{WorkerId}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Achieved FLOP/s",
            "From the shapes of what was computed, not measured (formula: METRICS.md). Prefill is "
            "bound by it.",
            (Query(per_second(worker.FLOP, "role"), "{{role}}"),),
            "flops",
            silent="the model's files do not tell its shape",
        ),
        Panel(
            "Achieved bytes/s",
            "Weights once a step and KV read and written, from shapes. Decode is bound by it.",
            (Query(per_second(worker.MEMORY, "role"), "{{role}}"),),
            "Bps",
            silent="the model's files do not tell its shape",
        ),
        Panel(
            "Engine KV blocks used",
            "Of the engine's own cache, users only. Near 1, requests are preempted.",
            (
                Query(
                    f"{now(worker.KV_BLOCKS, 'role', state='used')} / "
                    f"{now(worker.KV_BLOCKS, 'role')}",
                    "{{role}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Preemptions",
            "Requests put back for want of KV blocks: their work is done twice.",
            (Query(per_second(worker.PREEMPTIONS, "role"), "{{role}}"),),
            "cps",
        ),
    ),
)
_INGRESSES = Row(
    "Ingresses",
    (
        Panel(
            "CPU of the ingress",
            "Its event loop is one thread: near 1 the ingress itself is what requests wait for.",
            (Query(per_second(ingress.INGRESS_CPU, "WorkerId"), "{{WorkerId}}"),),
            "percentunit",
        ),
        Panel(
            "Loop lateness",
            "How late the loop runs what is due once a second: what every request waits besides.",
            (Query(per_second(ingress.LOOP_LATE, "WorkerId"), "{{WorkerId}}"),),
            "s",
        ),
        Panel(
            "Resumes, hand-overs, late outputs",
            "Resumes are workers that were lost in mid-answer; the client saw nothing of it.",
            (Query(per_second(ingress.FLOW_EVENTS, "kind"), "{{kind}}"),),
            "cps",
        ),
    ),
)
_KEYS = Row(
    "API keys",
    (
        Panel(
            "Refused by the gate",
            "Requests that went no further than the gate of API keys. missing, unknown: no right "
            "key; forbidden: an API key where an operator's is asked for; requests, tokens, "
            "concurrent: a key's own limits.",
            (Query(per_second(ingress.REFUSED_BY_KEYS, "reason"), "{{reason}}"),),
            "cps",
        ),
        Panel(
            "Keys in force",
            "As each ingress has read them; 0 while everything is open to whoever reaches it.",
            (Query(now(ingress.KEYS, "scope", "WorkerId"), "{{scope}} {{WorkerId}}"),),
            "none",
        ),
        Panel(
            "Files of keys found unusable",
            "The last good keys stay in force (HeadwaterKeysUnusable).",
            (Query(per_second(ingress.KEYS_FAILURES, "WorkerId"), "{{WorkerId}}"),),
            "cps",
        ),
    ),
)

DASHBOARD = Dashboard(
    "fleet",
    "Headwater: fleet",
    "What is asked of the fleet, who does the work, what works less well than it should.",
    (_TRAFFIC, _WORKERS, _INGRESSES, _KEYS),
)
