"""What to change for each cause: keys of the configuration, as `headwater config` names them.

Read by rules.py. A test holds each key against the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Setting:
    """One key, which way to move it, and what that does."""

    key: str
    change: Literal["raise", "lower", "change"]
    effect: str


_CORES = "workers.cores_per_worker"
PREFILL = (
    Setting("workers.prefill.replicas", "raise", "more engines compute prompts at once"),
    Setting(_CORES, "raise", "each prompt is computed faster, where there are cores to give"),
    Setting("slab.mib", "raise", "more prefixes stay cached, if prompts share some"),
)
DECODE = (
    Setting("workers.decode.replicas", "raise", "fewer streams share a step"),
    Setting("engine.max_num_seqs", "lower", "each step is shorter; more requests wait instead"),
    Setting("model.dtype", "change", "two-byte weights and KV are read in half the time"),
)
QUEUE = (
    Setting("engine.max_num_seqs", "raise", "more run at once, each a little slower"),
    Setting("workers.decode.replicas", "raise", "more slots, without slower steps"),
)
ADMISSION = (
    Setting("limits.queue_max_requests", "raise", "more wait instead of being refused"),
    Setting("engine.max_num_seqs", "raise", "admission counts the engines' slots"),
)
KV = (
    Setting("engine.kv_cache_mib", "raise", "more tokens fit into an engine"),
    Setting("workers.decode.replicas", "raise", "each has a KV cache of its own"),
    Setting("engine.max_num_seqs", "lower", "fewer at once, none preempted"),
)
SLAB = (
    Setting("slab.mib", "raise", "blocks find room, so that they need not be computed again"),
    Setting("slab.handoff_ttl_s", "lower", "abandoned hand-offs hold their blocks for less long"),
)
LINK = (
    Setting("links.advertised_host", "change", "blocks take the network of that address"),
    Setting("workers.decode.resources", "change", "places decode on the nodes that prefill is on"),
    Setting("router.caused_weight_idle", "lower", "more prompts stay where they are decoded"),
)
FRONT_END = (
    Setting(_CORES, "lower", "engines that hold every core leave none to the ingress"),
    Setting("http.through", "change", "through the ingress itself; Serve's proxy costs more"),
    Setting("limits.request_body_max_bytes", "lower", "huge bodies are refused before tokenising"),
)
ALL = (*PREFILL, *DECODE, *QUEUE, *ADMISSION, *KV, *SLAB, *LINK, *FRONT_END)
