"""Asks a running endpoint a question and streams the answer: for serve's greeting and the tests.

Standard library only, so that it says what any client would see.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from cluster.errors import StartError


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer. ttft_s: request sent to first content."""

    text: str
    ttft_s: float
    trace_id: str


def ask(
    endpoint: str,
    model: str,
    question: str,
    on_text: Callable[[str], object],
    *,
    max_tokens: int = 64,
    timeout_s: float = 120.0,
) -> Answer:
    """Stream one chat answer. Raises StartError when the endpoint answers with an error."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
    }
    request = urllib.request.Request(  # noqa: S310 - our own endpoint
        f"{endpoint}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    sent_s = time.monotonic()
    first_s: float | None = None
    parts: list[str] = []
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as stream:  # noqa: S310
            trace_id = stream.headers.get("x-headwater-request", "")
            for line in stream:
                if not line.startswith(b"data: ") or b"[DONE]" in line:
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise StartError(f"the answer ended in an error: {event['error']}")
                for choice in event["choices"]:
                    text = choice["delta"].get("content") or ""
                    if text and first_s is None:
                        first_s = time.monotonic()
                    parts.append(text)
                    on_text(text)
    except urllib.error.HTTPError as refused:
        raise StartError(f"the endpoint refused: {refused.code} {refused.read()!r}") from refused
    return Answer("".join(parts), (first_s or time.monotonic()) - sent_s, trace_id)
