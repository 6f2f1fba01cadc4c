"""Under which name vLLM's front end answers a request, behind a proxy that names every request.

vLLM takes the header X-Request-Id before the body's `request_id`, and Serve's proxy adds that
header where the client sent none: so the body's name would never count. Called by front_end.py.
Pure.
"""

from __future__ import annotations

import re

from deployments.valid_names import VALID_NAME

# As Serve draws names (a version 4 UUID), and as vLLM does.
_DRAWN_BY_SERVE = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_DRAWN_BY_VLLM = re.compile(r"[0-9a-f]{16}")


def request_name(header: str | None, body: str | None) -> str | None:
    """The name to use; None if neither will do.

    header: X-Request-Id, the client's or drawn by Serve. body: `request_id`, the client's or
    drawn by vLLM. What a client gave comes before what was drawn, the header before the body.
    """
    usable = body if body is not None and VALID_NAME.fullmatch(body) else None
    if header is None:
        return usable
    given = usable is not None and not _DRAWN_BY_VLLM.fullmatch(usable)
    return usable if given and _DRAWN_BY_SERVE.fullmatch(header) else header
