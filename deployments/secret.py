"""The cluster's secret: read from a file on each node, never carried by Ray.

Called by workers and ingresses. Ray's state API shows runtime environments and arguments, so the
secret must not be in either.
"""

from __future__ import annotations

from pathlib import Path

SECRET_BYTES_MIN = 16


def read_secret(path: str) -> bytes:
    """The secret's bytes. Raises RuntimeError that says what to do when it is not usable."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as missing:
        msg = f"cluster secret {path} cannot be read on this node ({missing}); put it there"
        raise RuntimeError(msg) from missing
    if len(secret) < SECRET_BYTES_MIN:
        msg = f"cluster secret {path} holds {len(secret)} bytes; it needs {SECRET_BYTES_MIN}"
        raise RuntimeError(msg)
    return secret
