"""Errors of starting the connector. Once it runs, no fault of the store is an error: it is a miss.

Called by config.py, layout.py, block_connector.py.
"""

from __future__ import annotations

from kvcache.errors import KvCacheError


class ConnectorMisconfigured(KvCacheError):
    """The engine's or connector's settings cannot work together; the message names the setting."""


class EngineUnsupported(KvCacheError):
    """The engine's KV cache has a shape that the connector does not handle (yet)."""
