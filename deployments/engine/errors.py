"""Errors of the engine package.

Raised by: deployments.engine; the worker maps RequestRejected to a failed request and lets every
other exception end its process.
"""

from __future__ import annotations


class EngineError(Exception):
    """Root of this package's errors."""


class RequestRejected(EngineError):
    """The engine cannot run this one request; it is untouched and goes on serving others."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"request {request_id!r} rejected: {reason}")
        self.request_id = request_id
        self.reason = reason


class MalformedBlob(EngineError):
    """Bytes from a link are not what codec.py wrote."""


class EngineMismatch(EngineError):
    """The installed vLLM does not behave as this package relies on; the message names where."""
