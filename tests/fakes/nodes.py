"""Facts of nodes, and a configuration whose auto values are resolved on one of them."""

from __future__ import annotations

from dataclasses import replace

from cluster.auto_values import resolve
from cluster.config import Config
from cluster.machine_limits import Memory
from cluster.model_store import BUNDLED_FIGURES
from cluster.node_facts import NodeFacts

GB = 10**9
FAST = NodeFacts("fast", 2, Memory(24 * GB, 20 * GB), native={"bfloat16": "avx512_bf16"})
SLOW = replace(FAST, name="slow", native={}, slow={"bfloat16": "no flag", "float16": "no flag"})


def resolved(config: Config, *nodes: NodeFacts) -> Config:
    """As the serve command deploys it: on two cores with native bfloat16, unless told otherwise."""
    return resolve(config, nodes or [FAST], BUNDLED_FIGURES).config
