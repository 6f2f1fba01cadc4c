"""The way of a request: where its time to first token goes, then the time between its tokens."""

from __future__ import annotations

from cluster.dashboards.panels import (
    Dashboard,
    Panel,
    Query,
    Row,
    now,
    over_all,
    per_second,
    quantile,
    quantiles,
)
from deployments.measures import ingress_list as ingress

_FIRST = Row(
    "To the first token",
    (
        Panel(
            "TTFT",
            "Received to first byte of the first token.",
            quantiles(ingress.TTFT),
            "s",
        ),
        Panel(
            "TTFT by part, mean",
            "The parts add up to the mean TTFT. queue grows when workers are short, prefill with "
            "prompts that no cache has, publish when the node agent is slow, handover when "
            "workers are lost, delivery when the ingress is busy.",
            (
                Query(
                    over_all(ingress.FIRST_TOKEN_SECONDS, ingress.FIRST_TOKENS, "part"), "{{part}}"
                ),
            ),
            "s",
            stacked=True,
        ),
        Panel(
            "TTFT by part, p95",
            "They do not add up: a slow part of one request is not the slow part of another.",
            (Query(quantile(0.95, ingress.TTFT_PARTS, "part"), "{{part}}"),),
            "s",
        ),
        Panel(
            "Predicted and measured",
            "Median of the router's prediction, and of TTFT: what decisions are made by.",
            (
                Query(quantile(0.5, ingress.TTFT_PREDICTED), "predicted"),
                Query(quantile(0.5, ingress.TTFT), "measured"),
            ),
            "s",
        ),
        Panel(
            "Measured over predicted",
            "1 is right. Far from it the router chooses badly: it has not learnt this load yet, "
            "or something slows workers that it does not see.",
            quantiles(ingress.TTFT_RATIO),
            "none",
        ),
        Panel(
            "Where requests are",
            "By stage. Parked ones have no worker that could take them.",
            (Query(now(ingress.IN_FLIGHT, "stage"), "{{stage}}"),),
            "none",
            stacked=True,
        ),
    ),
)
_TOKENS = Row(
    "Token by token, and to the end",
    (
        Panel(
            "ITL",
            "Every gap between two outputs, hand-overs and resumes included.",
            quantiles(ingress.ITL),
            "s",
        ),
        Panel(
            "TPOT",
            "A finished choice's mean time a token. Below ITL's p99 by much: few long stalls.",
            quantiles(ingress.TPOT),
            "s",
        ),
        Panel("E2E", "Of finished choices.", quantiles(ingress.E2E, outcome="finished"), "s"),
        Panel(
            "Refused, by status",
            "429: full. 503: no worker. 400 and their like: the client's own.",
            (Query(per_second(ingress.REFUSALS, "status"), "{{status}}"),),
            "reqps",
            silent="nothing was ever refused",
        ),
        Panel(
            "Failed and refused choices, by why",
            "The runbook says of each what to look at.",
            (Query(per_second(ingress.FAULTED, "reason"), "{{reason}}"),),
            "reqps",
        ),
        Panel(
            "Choices: tokens in and out",
            "Prompt and output tokens of choices that ended.",
            (
                Query(per_second(ingress.PROMPT_TOKENS), "prompt"),
                Query(per_second(ingress.OUTPUT_TOKENS), "output"),
            ),
            "cps",
        ),
    ),
)

DASHBOARD = Dashboard(
    "request-way",
    "Headwater: way of a request",
    "Where a request's time goes; one request's own way: ./headwater explain <id>.",
    (_FIRST, _TOKENS),
)
