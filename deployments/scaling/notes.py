"""What the autoscaler decided last, and why, from Serve's controller to whoever shows status.

A small record a role in Ray's key-value store: it outlives the controller, needs no actor, and
writing it takes a call to the GCS. Written by serve_policy.py, read by the ingress, forgotten by
cluster/launch.py. Must not raise: a status line is not worth a decision.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

log = logging.getLogger("headwater.scaling")

NAMESPACE = b"headwater-scaling"
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Note:
    """A decision. at_s: Unix time. last_change: the last decision that changed the size."""

    app: str
    role: str
    replicas: int
    replicas_min: int
    replicas_max: int
    action: str
    why: str
    at_s: float
    last_change: dict[str, Any] | None = None


def publish(note: Note) -> None:
    """Replace the role's note."""
    try:
        from ray.experimental.internal_kv import _internal_kv_put

        body = msgspec.json.encode(asdict(note))
        _internal_kv_put(_key(note.app, note.role), body, overwrite=True, namespace=NAMESPACE)
    except Exception:
        log.exception("the note of a scaling decision was not written")


def notes_of(app: str) -> list[dict[str, Any]]:
    """Of the roles that are scaled; empty where none is, or the store does not answer. Blocks."""
    try:
        from ray.experimental.internal_kv import _internal_kv_get

        found = [_internal_kv_get(_key(app, role), namespace=NAMESPACE) for role in ROLES]
        return [dict(msgspec.json.decode(body)) for body in found if body]
    except Exception:
        log.exception("the notes of scaling decisions were not read")
        return []


def forget(app: str) -> None:
    """The application has gone. Blocks."""
    try:
        from ray.experimental.internal_kv import _internal_kv_del

        for role in ROLES:
            _internal_kv_del(_key(app, role), namespace=NAMESPACE)
    except Exception:
        log.exception("the notes of scaling decisions were not taken away")


def _key(app: str, role: str) -> bytes:
    return f"{app}:{role}".encode()
