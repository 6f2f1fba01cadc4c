"""A request's body as the edge looks at it: read as JSON once at most.

Parsing is most of what the edge costs, and large bodies are the client's choice. Called by
http_edge.py, lone_surrogates.py and http_errors.py. Pure; must not know routes.
"""

from __future__ import annotations

import json
from typing import Any


class RequestBody:
    """One body. ``raw``: as the client sent it."""

    __slots__ = ("_asked", "_is_read", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._asked: Any = None
        self._is_read = False

    @property
    def asked(self) -> Any:
        """What its JSON says; None where it is none: vLLM answers that in its own words."""
        if not self._is_read:
            self._is_read = True
            try:
                self._asked = json.loads(self.raw)
            except (ValueError, RecursionError):
                self._asked = None
        return self._asked

    @property
    def fields(self) -> dict[str, Any]:
        """Of the object that it is; none of anything else."""
        return self.asked if isinstance(self.asked, dict) else {}
