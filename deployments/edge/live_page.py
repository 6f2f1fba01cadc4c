"""The live page: an ingress shown by a browser, with a chat box.

`GET /headwater/live` is the page. Below it lie its files (the folder page/, which holds no data)
and `requests`: the slowest and the newest requests in short. Everything else on the page comes from
the routes that `headwater status` and `headwater explain` read, asked for by the page's own code.
Mounted by ingress.py. Must not change anything (GET alone), or write what somebody said into HTML
or headers: page/dom.js alone puts text on the screen, as text.

Who may see it is not decided here. All of it lies below `LIVE_PATH`, and a browser that opens a
page sends no bearer token: whoever closes these routes must take the operator key as the password
of HTTP Basic too, and answer 401 with `WWW-Authenticate: Basic` below `LIVE_PATH`. Where only the
routes with data answer 401 or 403, the page asks for the key and sends it as a bearer token.
"""

from __future__ import annotations

import hashlib
import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from deployments.flow.request_record import RecordStore, RequestRecord, TtftParts, ttft_parts

LIVE_PATH = "/headwater/live"
PAGE = "page.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Everything from here, nothing inline, no string ever parsed as HTML or script.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, by its ETag: no old page after new
}
TRACES_LOOKED_AT = 256  # of the newest: a look is a fraction of a millisecond of the event loop
COUNT_MAX = 50


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    content: bytes
    media_type: str
    etag: str


def page_files() -> dict[str, PageFile]:
    """The files of the page by name, from this package."""
    found: dict[str, PageFile] = {}
    for entry in resources.files("deployments.edge").joinpath("page").iterdir():
        media_type = TYPES.get("." + entry.name.rpartition(".")[2])
        if media_type is not None:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[entry.name] = PageFile(content, media_type, etag)
    return found


def mount_live_page(
    app: FastAPI, records: RecordStore, clock: Callable[[], float] = time.monotonic
) -> None:
    """Add the page's routes to the application. Mutates it.

    clock: the one that the records' times are of.
    """

    def route(path: str, file: PageFile) -> None:
        async def answer(request: Request) -> Response:
            # A proxy that compresses marks the tag as weak, and a browser may send several.
            is_known = file.etag in request.headers.get("if-none-match", "")
            headers = {**HEADERS, "etag": file.etag}
            if is_known:
                return Response(status_code=304, headers=headers)
            return Response(file.content, media_type=file.media_type, headers=headers)

        app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)

    async def requests(count: int = 10, named: str = "") -> JSONResponse:
        """The slowest and the newest requests in short; `named`: the one with this name."""
        body = recent_requests(records, clock(), count=count, named=named)
        return JSONResponse(body, headers={"cache-control": "no-store"})

    for name, file in page_files().items():
        route(LIVE_PATH if name == PAGE else f"{LIVE_PATH}/{name}", file)
    app.add_api_route(f"{LIVE_PATH}/requests", requests)


def recent_requests(
    records: RecordStore, now_s: float, *, count: int, named: str = ""
) -> dict[str, Any]:
    """Of the newest requests the slowest to their first token and the newest, ``count`` of each.

    named: text that the name of a request holds, such as the X-Request-Id that its client gave: a
    stream's headers, which name it, leave with the first token only.
    """
    count = max(0, min(count, COUNT_MAX))
    traces = [
        _Trace.of(name, records.get(name), now_s) for name in records.latest(TRACES_LOOKED_AT)
    ]
    mine = (one.name for one in traces if named and named in one.record.request_id)
    slow = [one for one in traces if one.waited_s is not None]
    slowest = heapq.nlargest(count, slow, key=lambda one: one.waited_s or 0.0)
    return {
        "named": next(mine, None),
        "looked_at": len(traces),
        "slowest": [one.as_json(now_s) for one in slowest],
        "newest": [one.as_json(now_s) for one in traces[:count]],
    }


@dataclass(frozen=True, slots=True)
class _Trace:
    """An HTTP request: of several answers to it, the one whose first token took longest."""

    name: str
    choices: int
    record: RequestRecord
    waited_s: float | None

    @classmethod
    def of(cls, name: str, records: Sequence[RequestRecord], now_s: float) -> _Trace:
        waits = [_waited_s(one, now_s) for one in records]
        slowest = max(range(len(records)), key=lambda number: waits[number] or 0.0)
        return cls(name, len(records), records[slowest], waits[slowest])

    def as_json(self, now_s: float) -> dict[str, Any]:
        record, parts = self.record, ttft_parts(self.record)
        return {
            "trace_id": self.name,
            "choices": self.choices,
            "age_s": now_s - record.received_s,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "outcome": record.outcome,
            "detail": record.detail,
            "waited_ms": None if self.waited_s is None else 1e3 * self.waited_s,
            "has_token": record.first_token_s is not None,
            "most": None if parts is None else _largest_part(parts),
            "workers": [attempt.worker for attempt in record.attempts],
        }


def _waited_s(record: RequestRecord, now_s: float) -> float | None:
    """Time to the first token, or so far; None where the request ended without one."""
    if record.first_token_s is not None:
        delivered_s = record.delivered_s
        end_s = record.first_token_s if delivered_s is None else delivered_s
        return end_s - record.received_s
    return None if record.outcome is not None else now_s - record.received_s


def _largest_part(parts: TtftParts) -> dict[str, Any]:
    by_name = {name: ms for name, ms in asdict(parts).items() if name != "total_ms"}
    name = max(by_name, key=lambda part: by_name[part])
    return {"part": name.removesuffix("_ms"), "ms": by_name[name]}
