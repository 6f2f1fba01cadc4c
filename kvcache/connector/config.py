"""The connector's settings, as the worker puts them into vLLM's kv_connector_extra_config.

Called by session.py. Must not import vllm. Unknown keys are errors that name the nearest right one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvcache.connector.errors import ConnectorMisconfigured

ROLES = ("prefill", "decode")
SECONDS_MAX = 3600.0
COUNTS = {  # the least and the most
    "pull_streams": (1, 16),
    "pull_window_slots": (1, 1024),
    "pull_staging_slots": (1, 4096),
    "peers_max": (1, 1024),
    "prefetches_max": (0, 256),
    "bounce_mib": (1, 4096),
}


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

    secret_file: path of the cluster's secret, read once; "" turns pulls from other nodes off, and
    what asks for one is counted. A look-up at a peer is bounded by lookup_timeout_s, too.
    pull_timeout_s: how long a pull may take, from when the request's local blocks are there; the
    blocks that have not come by then are recomputed. pull_streams: connections to each peer that
    carry blocks. pull_window_slots: staging slots that one pull may use. pull_staging_slots: of all
    pulls together, a block's size each; as many as two windows, so that one peer that hangs leaves
    room for the others. peers_max: peers that are kept connected; one more closes the one that was
    asked longest ago. prefetches_max: hand-offs whose blocks are brought into the own node's slab
    at a time, while they are computed on another one; 0: none. They have as many staging slots
    again.

    Of engines on GPUs alone: pin_slab: let DMA reach the slab itself; the whole of it is taken into
    memory for that. bounce_mib: size of each of the three pinned buffers and the two on the device
    through which blocks go; more of them are copied at once.
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
    secret_file: str = ""
    pull_timeout_s: float = 5.0
    pull_streams: int = 1
    pull_window_slots: int = 8
    pull_staging_slots: int = 16
    peers_max: int = 16
    prefetches_max: int = 8
    pin_slab: bool = True
    bounce_mib: int = 32
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
        for key, (least, most) in COUNTS.items():
            if not least <= getattr(config, key) <= most:
                raise ConnectorMisconfigured(f"{key} must be in {least}..{most}")
        return config

    def read_secret(self) -> bytes | None:
        """The cluster's secret; None where pulls are off. Raises ConnectorMisconfigured."""
        if not self.secret_file:
            return None
        try:
            secret = Path(self.secret_file).read_bytes().strip()
        except OSError as error:
            raise ConnectorMisconfigured(f"secret_file cannot be read: {error}") from error
        if not secret:
            raise ConnectorMisconfigured(f"secret_file {self.secret_file} is empty")
        return secret
