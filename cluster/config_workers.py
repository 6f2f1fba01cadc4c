"""Configuration of the workers: how many, where, on how many cores. Part of cluster/config.py."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from cluster.config_scaling import ReplicasConfig
from cluster.config_section import (
    AUTO,
    AUTO_OR_NUMBER,
    DRAIN_MARGIN_S,
    NUMBER,
    AutoValue,
    Section,
    unresolved,
)

CORES_MAX = 256
AUTO_CORES_MAX = 16
RESERVED_ABOVE_CORES = 2
CORES_A_RESERVED = 16
RAY_RESOURCES = frozenset({"", "CPU", "GPU", "memory", "object_store_memory"})


class WorkerRoleConfig(ReplicasConfig):
    """How many workers one role has, and on which nodes they may run."""

    cores_per_worker: int | None = Field(
        default=None,
        ge=1,
        le=CORES_MAX,
        description="Cores of a worker of this role, where it is not workers.cores_per_worker.",
    )
    resources: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "Custom Ray resources, by name, that each worker of this role takes: it runs only on "
            "nodes that offer them (ray start --resources), and waits where too few are left. "
            "Places roles on groups of nodes."
        ),
    )

    @field_validator("resources")
    @classmethod
    def _ray_takes_the_resources(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, amount in resources.items():
            if name in RAY_RESOURCES:
                raise ValueError(f"{name!r} is not a custom resource")
            if not (0 < amount <= 1 or (amount > 1 and amount.is_integer())):
                raise ValueError(f"{name} is {amount:g}, must be up to 1, or a whole number")
        return resources


class WorkersConfig(Section):
    """The workers of both roles, and the cores that each gets."""

    prefill: WorkerRoleConfig = Field(default_factory=WorkerRoleConfig)
    decode: WorkerRoleConfig = Field(default_factory=WorkerRoleConfig)
    cores_per_worker: Annotated[
        AutoValue | Annotated[int, Field(ge=1, le=CORES_MAX), NUMBER], AUTO_OR_NUMBER
    ] = Field(
        default=AUTO,
        description=(
            "Cores, and so compute threads, of one worker, or of one of its ranks. Workers that "
            "share cores slow each other down by far more than half. auto: an equal share of each "
            "node's physical cores, and the rest of the division for prefill, after one core (and "
            f"one more for every {CORES_A_RESERVED}) is left to the ingress and Ray; up to "
            f"{RESERVED_ABOVE_CORES} cores all are shared out, and a worker takes at most "
            f"{AUTO_CORES_MAX}."
        ),
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description=(
            "Ranks that each worker of both roles splits the model over, each a process with "
            "cores_per_worker cores. Must divide the model's KV heads. Blocks of other nodes are "
            "not pulled with more than one."
        ),
    )
    pin_cores: bool = Field(
        default=True,
        description="Bind each worker to cores of its own. Leave it on unless something else does.",
    )
    drain_s: float = Field(
        default=45.0,
        ge=0,
        le=86400,
        description=(
            "Seconds in which a worker that Serve takes away may finish what it runs; what is left "
            "then goes on elsewhere, from the tokens so far. Shorter frees nodes sooner; 0 moves "
            "every stream at once. Where all workers end (stop) there is no elsewhere, and what is "
            "left is cut."
        ),
    )
    stall_s: float = Field(
        default=20.0,
        gt=0,
        le=3600,
        description=(
            "Seconds without a turn of its engine after which a worker gets no new requests, and "
            "does not count as ready, until it turns again. It must exceed the longest engine step "
            "(1 to 2 s for 1024 prompt tokens on one core, more with a larger "
            "engine.max_num_batched_tokens); lower notices a stuck engine sooner. A worker whose "
            "whole process is silent gets no new requests after 3 s and is given up after 10 s, "
            "whatever this is."
        ),
    )
    stall_replace_s: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description=(
            "Seconds without a turn after which the worker is replaced, and its requests go on "
            "elsewhere. A replacement takes 12 to 17 s and begins with an empty cache."
        ),
    )

    def cores_of(self, role: WorkerRoleConfig) -> int:
        """Cores of one worker of a role, all its ranks together.

        Never auto: cluster/auto_values.py has to come first. Raises ConfigError.
        """
        cores = role.cores_per_worker or self.cores_per_worker
        if cores == AUTO:
            raise unresolved("workers.cores_per_worker")
        return cores * self.tensor_parallel_size

    @property
    def cores_wanted(self) -> int:
        """Cores of all workers that there may be."""
        return sum(self.cores_of(role) * role.most for role in (self.prefill, self.decode))

    @property
    def kill_after_s(self) -> float:
        """Seconds that Serve lets a worker finish."""
        return self.drain_s + DRAIN_MARGIN_S

    @model_validator(mode="after")
    def _replaced_after_it_is_avoided(self) -> Self:
        if self.stall_replace_s < self.stall_s:
            message = (
                f"stall_replace_s ({self.stall_replace_s:g}) must be at least stall_s "
                f"({self.stall_s:g}): a worker is avoided before it is replaced"
            )
            raise ValueError(message)
        return self
