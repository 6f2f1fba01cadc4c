"""A request's body as the edge looks at it: read as JSON once at most, and where it must be alone.

Parsing is most of what the edge costs, and large bodies are the client's choice. Called by
http_edge.py and lone_surrogates.py. Pure; must not know routes.
"""

from __future__ import annotations

import json
from typing import Any

# Text in which any name may be: JSON's escapes; UTF-16 and UTF-32, which json.loads reads too and
# where each ASCII character has zero bytes beside it.
_DISGUISES = (b"\\u", b"\0")


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

    def fields_if(self, *names: bytes) -> dict[str, Any]:
        """The body's fields where one of these texts may be in it, and it is an object; none else.

        Not parsed where they cannot be, which is nearly always.
        """
        if any(text in self.raw for text in (*names, *_DISGUISES)) and isinstance(self.asked, dict):
            return self.asked
        return {}
