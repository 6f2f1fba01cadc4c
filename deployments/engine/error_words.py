"""vLLM's errors without paths and addresses, in time that grows with their length alone.

Its front end (0.32) repeats what a client sent, whole, and looks through that with expressions that
try each place to the end: a model's name of 8 KB of "/a/a/a" took 2.7 s on the event loop, of 64 KB
minutes. Called by front_end.py.
"""

from __future__ import annotations

import re

from vllm.entrypoints.anthropic import serving as of_messages
from vllm.entrypoints.serve.exception_handling import error_response
from vllm.entrypoints.serve.exception_handling.handlers import http, validation

CHARS_MAX = 8_000
_USERS = (error_response, http, validation, of_messages)
# As vLLM has them, but none gives back what it has taken.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]++>")
_FRAME = re.compile(r'(?<!\s)\s*+File "[^"]++", line \d++, in \S++(\n\s++.*+)?')
_KNOWN_PATH = re.compile(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]++)++")
_PATH = re.compile(r"(?:/[\w\-]++){2,}+(\.\w++)?")  # only with an ending; without: looked at once


def shown(message: str) -> str:
    """As vLLM's sanitize_message, of the first CHARS_MAX characters."""
    message = _ADDRESS.sub(">", message[:CHARS_MAX])
    message = _FRAME.sub("", message)
    message = _KNOWN_PATH.sub("<path>", message)
    return _PATH.sub(lambda found: "<path>" if found[1] else found[0], message).strip()


def show_errors_so() -> None:
    """Let vLLM's front end use it. Mutates its modules. Raises AttributeError if it has moved."""
    for user in _USERS:
        assert callable(user.sanitize_message)
        user.sanitize_message = shown
