"""The KV plane: what caches saved, blocks on their way, slabs and leases, the directory's word."""

from __future__ import annotations

from cluster.dashboards.panels import Dashboard, Panel, Query, Row, now, over_all, per_second
from deployments.measures import ingress_list as ingress
from deployments.measures import worker_list as worker

_CACHE = Row(
    "What caches saved",
    (
        Panel(
            "Cached share of prompts",
            "Prompt tokens that were not computed, of all, by where they were.",
            (
                Query(
                    over_all(ingress.CACHED_TOKENS, ingress.PROMPT_TOKENS, "source"), "{{source}}"
                ),
            ),
            "percentunit",
            stacked=True,
        ),
        Panel(
            "Engines' own count",
            "Cached over prompt tokens as vLLM counts them; equal to the left within what is in "
            "flight.",
            (
                Query(
                    f"{per_second(worker.CACHED, 'role')} / {per_second(worker.PROMPTS, 'role')}",
                    "{{role}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Shadow audits",
            "Requests run again without reuse. disagreed must stay 0: it means wrong tokens.",
            (Query(per_second(ingress.AUDITS, "outcome"), "{{outcome}}"),),
            "cps",
        ),
    ),
)
_TRANSFERS = Row(
    "Blocks on their way",
    (
        Panel(
            "Bytes moved",
            "loaded includes pulled (from other nodes).",
            (Query(per_second(worker.TRANSFER_BYTES, "way"), "{{way}}"),),
            "Bps",
        ),
        Panel(
            "Speed of one transfer",
            "Bytes over the time that transfers took, side by side ones added up.",
            (
                Query(
                    f"{per_second(worker.TRANSFER_BYTES, 'way')} / "
                    f"{per_second(worker.TRANSFER_SECONDS, 'way')}",
                    "{{way}}",
                ),
            ),
            "Bps",
        ),
        Panel(
            "Blocks",
            "Loaded, pulled and published.",
            (Query(per_second(worker.BLOCKS, "way"), "{{way}}"),),
            "cps",
        ),
        Panel(
            "Loads that failed",
            "By the first block's reason; the blocks are recomputed. corrupt must stay 0.",
            (
                Query(per_second(worker.LOAD_FAILURES, "reason"), "{{reason}}"),
                Query(per_second(worker.RECOMPUTED), "blocks recomputed"),
            ),
            "cps",
        ),
        Panel(
            "Pulls that failed",
            "From other nodes' slabs, by reason. off: the node does not let others read it.",
            (Query(per_second(worker.PULL_FAILURES, "reason"), "{{reason}}"),),
            "cps",
        ),
        Panel(
            "Publications that failed",
            "no_room: the slab is full of leased blocks. no_agent: the node agent does not answer.",
            (Query(per_second(worker.STORE_FAILURES, "reason"), "{{reason}}"),),
            "cps",
        ),
    ),
)
_SLABS = Row(
    "Slabs and leases",
    (
        Panel(
            "Slots by state",
            "Of all slabs. A slab is meant to be full of published blocks; filling and "
            "quarantined ones should come and go.",
            (Query(now(worker.SLAB_SLOTS, "state"), "{{state}}"),),
            "none",
            stacked=True,
        ),
        Panel(
            "Leases open, slots leased",
            "Both fall to 0 when nothing is in flight (I3); where they do not, something leaks.",
            (
                Query(now(worker.SLAB_LEASES), "leases"),
                Query(now(worker.SLAB_LEASED), "slots"),
            ),
            "none",
        ),
        Panel(
            "What happens to leases",
            "expired and orphaned ones were left by somebody who died or stalled.",
            (Query(per_second(worker.LEASE_EVENTS, "event"), "{{event}}"),),
            "cps",
        ),
        Panel(
            "Evictions",
            "Published blocks dropped for newer ones. Many, with a low cached share: the slab is "
            "too small for what comes back.",
            (Query(per_second(worker.SLAB_EVICTED), "blocks"),),
            "cps",
        ),
        Panel(
            "Loads in progress",
            "Requests whose blocks are on their way.",
            (Query(now(worker.LOADS_NOW, "role"), "{{role}}"),),
            "none",
        ),
        Panel(
            "Staging slots in quarantine",
            "Something may still write to them: pulls that ended early.",
            (Query(now(worker.STAGING, "role", state="quarantined"), "{{role}}"),),
            "none",
        ),
    ),
)
_DIRECTORY = Row(
    "Directory and router",
    (
        Panel(
            "Directory age",
            "Since it last answered, of the worst ingress. Above 15 s it is lost: routing goes "
            "by load.",
            (Query(now(ingress.DIRECTORY_AGE, how="max"), "age"),),
            "s",
        ),
        Panel(
            "Sources by freshness",
            "Slabs and engines in the routers' indexes; what a degraded one holds does not count.",
            (Query(now(ingress.DIRECTORY_SOURCES, "freshness"), "{{freshness}}"),),
            "none",
            stacked=True,
        ),
        Panel(
            "Digests",
            "What writers say they hold against what the router believes. Each that differs is "
            "mended by a snapshot.",
            (Query(per_second(ingress.DIGESTS, "outcome"), "{{outcome}}"),),
            "cps",
        ),
        Panel(
            "Doubts",
            "Times that a source stopped counting, by why.",
            (Query(per_second(ingress.DOUBTS, "reason"), "{{reason}}"),),
            "cps",
            silent="no source was ever in doubt",
        ),
        Panel(
            "Decisions that left blocks out",
            "By why.",
            (Query(per_second(ingress.FALLBACKS, "reason"), "{{reason}}"),),
            "cps",
        ),
        Panel(
            "Blocks in the index",
            "Of the largest one, and evictions a second from all: above 0 the bound is too low.",
            (
                Query(now(ingress.INDEX_BLOCKS, how="max"), "blocks"),
                Query(per_second(ingress.INDEX_EVICTIONS), "evicted/s"),
            ),
            "none",
        ),
    ),
)

DASHBOARD = Dashboard(
    "kv-plane",
    "Headwater: KV plane",
    "What caches saved, blocks on their way, slabs and leases, how sure the directory is.",
    (_CACHE, _TRANSFERS, _SLABS, _DIRECTORY),
)
