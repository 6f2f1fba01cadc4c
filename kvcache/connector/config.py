"""The connector's settings, as the worker puts them into vLLM's kv_connector_extra_config.

Called by session.py. Must not import vllm. Unknown keys are errors that name the nearest right one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcache.connector.errors import ConnectorMisconfigured

ROLES = ("prefill", "decode")
SECONDS_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """One worker's settings. Times are in seconds.

    agent_socket: path of the node agent's Unix socket. owner: the worker's id.
    role: "prefill" waits for its publications before a hand-off leaves, "decode" never waits.
    model: the served name. hash_root: hex root of vLLM's block hashes, "" to take the engine's.
    lease_ttl_s: how long the agent keeps looked-up blocks for us if we never release them; a
    look-up older than half of it is made again before it is used. handoff_ttl_s: how long published
    blocks wait for the decode worker. fill_ttl_s: how long a granted slot may stay unfilled; longer
    than the longest step. lookup_timeout_s: after it a pending look-up counts as a miss.
    lookup_grace_s: how long the scheduler itself waits for the agent's answer, so that a request
    is not put off by a whole step for an answer that takes 0.2 ms.
    allocate_timeout_s, publish_timeout_s: bounds on waiting in the step that publishes.
    """

    agent_socket: str
    owner: str
    role: str
    model: str
    hash_root: str = ""
    lease_ttl_s: float = 30.0
    handoff_ttl_s: float = 30.0
    fill_ttl_s: float = 60.0
    connect_timeout_s: float = 2.0
    lookup_timeout_s: float = 0.5
    lookup_grace_s: float = 0.002
    allocate_timeout_s: float = 0.1
    publish_timeout_s: float = 0.5
    fail_blocks: tuple[int, ...] = ()
    hold_loads: bool = False

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Check and convert; `inject` is {"fail_blocks": [i, ...], "hold_loads": bool}, for tests.

        Raises ConnectorMisconfigured naming the key.
        """
        settings = dict(extra)
        settings.update(settings.pop("inject", None) or {})
        known = {field.name for field in fields(cls)}
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConnectorMisconfigured(f"unknown key {key!r} in extra_config{hint}")
        for key in ("agent_socket", "owner", "role", "model"):
            if not settings.get(key):
                raise ConnectorMisconfigured(f"extra_config lacks {key}")
        settings["fail_blocks"] = tuple(settings.get("fail_blocks", ()))
        config = cls(**settings)
        if config.role not in ROLES:
            raise ConnectorMisconfigured(f"role {config.role!r} is not one of {ROLES}")
        for field in fields(cls):
            if field.name.endswith("_s") and not 0 <= getattr(config, field.name) <= SECONDS_MAX:
                raise ConnectorMisconfigured(f"{field.name} must be in 0..{SECONDS_MAX} seconds")
        return config
