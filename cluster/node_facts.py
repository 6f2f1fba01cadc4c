"""What the values that are `auto` are chosen by: the CPU, cores and memory of each node.

Called by serve, config, doctor, prepare and lessons. `here` looks at this machine; `of_cluster` has
each node of a running Ray cluster look at itself. Must not import ray at its head.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cluster.errors import StartError
from cluster.machine_limits import Memory, compute_cores, usable_memory

HERE = "this machine"
LOOK_TIMEOUT_S = 120.0  # a node may have to fetch our code first
BUILD_VARIABLE = "HEADWATER_BUILD"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node.

    native: the flag by which its CPU computes a dtype natively. slow: why it computes one slowly.
    cores: whole ones for engines. resources: Ray's custom ones that it offers.
    """

    name: str
    cores: int
    memory: Memory
    native: Mapping[str, str] = field(default_factory=dict)
    slow: Mapping[str, str] = field(default_factory=dict)
    has_gpu: bool = False
    resources: frozenset[str] = frozenset()


def here(environ: Mapping[str, str] = os.environ) -> NodeFacts:
    """Look at this machine, within its cgroup and this process's affinity."""
    native, slow = _dtypes(environ)
    return NodeFacts(
        name=HERE,
        cores=compute_cores(),
        memory=usable_memory(),
        native=native,
        slow=slow,
        has_gpu=environ.get(BUILD_VARIABLE) == "gpu",
    )


def _dtypes(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    try:
        # Here, so that the doctor can say that another `deployments` is on the path.
        from deployments.cpu_precision import NATIVE, cpu_flags, native_flag, slow_reason
    except ImportError:
        return {}, {}
    flags = cpu_flags(environ)
    native = {dtype: native_flag(flags, dtype) for dtype in NATIVE}
    slow = {dtype: slow_reason(flags, dtype) for dtype in NATIVE}
    return (
        {dtype: flag for dtype, flag in native.items() if flag},
        {dtype: reason for dtype, reason in slow.items() if reason},
    )


def of_cluster() -> list[NodeFacts]:
    """Each node of the connected Ray cluster that offers CPUs. Raises StartError."""
    import ray
    from ray._private.state import available_resources_per_node
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(here)
    free = available_resources_per_node()
    looks, found = {}, []
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU", 0) >= 1:
            on_it = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            looks[node["NodeID"]] = node, look.options(scheduling_strategy=on_it).remote()
    for node_id, (node, pending) in looks.items():
        name = f"node {node['NodeManagerAddress']}"
        try:
            seen: NodeFacts = ray.get(pending, timeout=LOOK_TIMEOUT_S)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as failed:
            message = (
                f"{name} does not say what it has ({type(failed).__name__}): remove it from the "
                "Ray cluster, or name model.dtype, engine.kv_cache_mib and "
                "workers.cores_per_worker instead of auto"
            )
            raise StartError(message) from failed
        offered = int(free.get(node_id, {}).get("CPU", 0))
        resources = frozenset(node["Resources"])
        cores = max(1, min(seen.cores, offered))
        found.append(replace(seen, name=name, cores=cores, resources=resources))
    if not found:
        message = "no node of the Ray cluster offers a CPU: start one with ray start --num-cpus"
        raise StartError(message)
    return found
