"""Differences between plain vLLM and Headwater that are meant or cannot be had, with a reason each.

A known difference must occur: one that does not any more is a failure (test_parity.py). What
depends on chance is not compared at all, and is listed apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.e2e.parity.comparison import ABSENT, Difference

EVERYWHERE: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """Differences that have one reason.

    Attributes:
        paths: of the differences, as a regular expression for the whole path.
        names: the requests, each of which must show it; EVERYWHERE: at least one request must.
        about: only requests whose whole name is like this regular expression.
        plain: what the plain server's side must be, one of these; empty: anything.
        statuses: of the plain server and ours, where the status is what differs.

    """

    reason: str
    paths: str
    names: tuple[str, ...] = EVERYWHERE
    statuses: tuple[int, int] | None = None
    about: str = ".*"
    plain: tuple[str | None, ...] = ()

    def covers(self, name: str, difference: Difference) -> bool:
        """Whether this is such a difference."""
        if (self.names and name not in self.names) or not re.fullmatch(self.about, name):
            return False
        if self.plain and difference.plain not in self.plain:
            return False
        if difference.path == "status":
            return (difference.plain, difference.ours) == self.statuses
        return re.fullmatch(self.paths, difference.path) is not None


@dataclass(frozen=True)
class NotCompared:
    """Values that are there on both sides, and may differ from run to run or by design."""

    reason: str
    paths: str
    names: tuple[str, ...] = EVERYWHERE

    def covers(self, name: str, difference: Difference) -> bool:
        """Whether this difference is of such values. That one side lacks it always counts."""
        if (self.names and name not in self.names) or ABSENT in (difference.plain, difference.ours):
            return False
        return re.fullmatch(self.paths, difference.path) is not None


def both(*names: str) -> tuple[str, ...]:
    """The names of requests that are sent at once and streamed."""
    return tuple(way for name in names for way in (name, f"{name}, streamed"))


OUR_ROUTES = (
    "/v1/models/{model}",
    "/ready",
    "/headwater/status",
    "/headwater/ledger",
    "/headwater/events",
    "/headwater/live/requests",
    "/headwater/requests",
    "/headwater/requests/{trace_id}",
)
REMOVED_ROUTES = ("/scale_elastic_ep", "/is_scaling_elastic_ep")
REFUSED_FIELDS = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "kv_hints")

# What the edge makes of errors (deployments/edge/http_errors.py); what they say is compared.
OF_ERRORS = (
    Known(
        "below /v1/messages every error has Anthropic's shape and types; vLLM gives OpenAI's to a "
        "body that does not validate, and its own types to others",
        r"body\.(shape|type)",
        about="messages: .*|http: .*/v1/messages.*",
    ),
    Known(
        "errors of the web framework have OpenAI's shape too, with a type",
        r"body\.(shape|type)",
        plain=("FastAPI", None),
    ),
    Known(
        "what fails before the first event of a stream is an HTTP error, which clients raise",
        r"headers\.content-type|refused in a stream that ends with",
        (
            "completions: refused in a stream, streamed",
            "grammars: regex that does not parse, stream, streamed",
            "grammars: regex with a look-ahead, stream, streamed",
        ),
        (200, 400),
    ),
    Known(
        "vLLM fails on the type of a field that it takes for granted; the client is at fault",
        r"body\.(message|type)",
        ("grammars: structured outputs of wrong type",),
        (500, 400),
    ),
    Known(
        "vLLM's words are about its tokenizer's types or a max_tokens that the client did not set",
        r"body\.message",
        ("completions: lone surrogate", "completions: prompt as long as the context"),
    ),
)

WITH_CALLS = (
    *both("tools: after a call", "responses: response after a call"),
    *both("messages: message after a call"),
    "tools: call with arguments that are no JSON",
    "messages: message with a thought of old",
    "messages: message with a failed call",
    "messages: count tokens after a call",
)
UNSERVED = (
    "tools: functions of old",
    "responses: response with a built-in tool",
    "responses: response with an interpreter",
)
# What plain vLLM leaves out of a prompt in silence (deployments/engine/chat_input.py), or passes
# over (deployments/edge/unserved.py).
OF_LOST_INPUT = (
    Known(
        "the bundled template has no place for an assistant's calls and thoughts: vLLM loses them, "
        "here they are written into its content",
        r".*",
        WITH_CALLS,
    ),
    Known(
        "tools that a server runs, and fields that nobody reads, are refused by name",
        r".*",
        UNSERVED,
        (200, 400),
    ),
    Known(
        "a schema's keyword that no grammar keeps is named",
        r"body\.message",
        ("grammars: json schema with multipleOf",),
    ),
)

KNOWN = (
    *OF_ERRORS,
    *OF_LOST_INPUT,
    Known(
        "a route with a last slash answers: its redirect would be a request of its own, and count",
        r"body|headers\.(content-type|location)",
        ("http: trailing slash of completions",),
        (307, 200),
    ),
    Known(
        "it is a hash of one engine's configuration; a cluster's engines are configured otherwise",
        r"(.*\.)?system_fingerprint",
    ),
    Known(
        "process figures of another process, and of another kind of server",
        "body",
        ("tokens: metrics",),
    ),
    *(
        Known(
            "a route of ours, which plain vLLM does not have",
            re.escape(f"body.paths.{route}"),
            ("tokens: interface",),
        )
        for route in OUR_ROUTES
    ),
    *(
        Known(
            "any client could resize an engine with it: removed",
            re.escape(f"body.paths.{route}"),
            ("tokens: interface",),
        )
        for route in REMOVED_ROUTES
    ),
    Known(
        "any client could resize an engine with it: removed",
        r"body\..*",
        ("http: not served: /scale_elastic_ep",),
        (400, 404),
    ),
    Known(
        "any client could resize an engine with it: removed",
        r"body\..*",
        ("http: not served: /is_scaling_elastic_ep",),
        (200, 404),
    ),
    Known(
        "any client could end others' requests with it: removed, not only switched off",
        r"body\..*",
        ("http: not served: /inference/v1/abort_requests",),
        (403, 404),
    ),
    Known(
        "steers transfers between our own engines: refused from clients",
        r"body\..*",
        tuple(f"http: refused field {field}" for field in REFUSED_FIELDS),
        (200, 400),
    ),
)

NOT_COMPARED = (
    NotCompared(
        "errors carry the string codes of OpenAI's API, and name the field where it is known; "
        "vLLM repeats the status as a number",
        r"body\.(code|param)|stream\.after\[\d+\]\.error\.(code|param)",
    ),
    NotCompared(
        "whether a sibling finds the blocks of the other depends on the step in which either "
        "begins: plain vLLM computes this prompt in one step, a prefill worker in several",
        r"(.*\.)?prompt_tokens_details\.(cached_tokens|created_cache_tokens)",
        (
            *both("completions: two choices, long", "chat: three choices, long"),
            "completions: prompt logprobs of two choices",
        ),
    ),
)


def unexplained(name: str, found: Iterable[Difference]) -> list[Difference]:
    """The differences of a request that nothing above covers."""
    tables = (*KNOWN, *NOT_COMPARED)
    return [d for d in found if not any(entry.covers(name, d) for entry in tables)]
