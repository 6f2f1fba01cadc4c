"""Configuration of how many workers a role has, and when that changes. Part of cluster/config.py.

Replica bounds are each role's own (workers.prefill, workers.decode); what both are judged by is
`scaling`. The policy is deployments/scaling/policy.py.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from cluster.config_section import Section

WORKERS_MAX = 1024


class ReplicasConfig(Section):
    """How many workers one role has."""

    replicas: int = Field(
        default=1,
        ge=1,
        le=WORKERS_MAX,
        description=(
            "Workers of this role, each one engine in one process; where their number may change, "
            "as many at the start."
        ),
    )
    replicas_min: int | None = Field(
        default=None,
        ge=1,
        le=WORKERS_MAX,
        description="The fewest workers that autoscaling leaves; without it, replicas.",
    )
    replicas_max: int | None = Field(
        default=None,
        ge=1,
        le=WORKERS_MAX,
        description=(
            "The most workers of this role. More than replicas_min turns autoscaling on for the "
            "role, by the bounds in `scaling`; without it, replicas."
        ),
    )

    @property
    def least(self) -> int:
        """The fewest workers that there ever are."""
        return self.replicas if self.replicas_min is None else self.replicas_min

    @property
    def most(self) -> int:
        """The most workers that there ever are."""
        return self.replicas if self.replicas_max is None else self.replicas_max

    @property
    def scales(self) -> bool:
        """Whether their number may change."""
        return self.least < self.most

    @model_validator(mode="after")
    def _starts_within_its_bounds(self) -> Self:
        if not self.least <= self.replicas <= self.most:
            message = (
                f"replicas ({self.replicas}) must be within replicas_min ({self.least}) and "
                f"replicas_max ({self.most}): that many start"
            )
            raise ValueError(message)
        return self


class ScalingConfig(Section):
    """When workers are added and taken away, where a role's replicas may change."""

    ttft_ms: float = Field(
        default=2000.0,
        gt=0,
        le=3.6e6,
        description=(
            "Prefill grows beyond this predicted TTFT: the time that prompts which are there still "
            "take, at the speed measured. Lower answers sooner and needs more workers."
        ),
    )
    waiting_max: float = Field(
        default=4.0,
        gt=0,
        le=1e6,
        description="Prefill grows beyond this many waiting prompts for each of its workers.",
    )
    busy_max: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description=(
            "Share of time that a prefill worker computes; none is taken away where the others "
            "would come near it, since a queue grows without limit at 1."
        ),
    )
    tpot_ms: float = Field(
        default=200.0,
        gt=0,
        le=3.6e6,
        description=(
            "Decode grows beyond this TPOT, while steps hold more than one request: else another "
            "worker would not help. The default suits CPUs; a GPU's is 20 to 50."
        ),
    )
    kv_max: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description=(
            "Decode grows when requests hold more than this share of its KV blocks. Near 1 they "
            "preempt each other."
        ),
    )
    slots_max: float = Field(
        default=0.9,
        gt=0,
        le=10,
        description="Decode grows beyond this share of its slots taken (engine.max_num_seqs).",
    )
    up_after_s: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        description="Seconds beyond a bound before workers are added. Short bursts need none.",
    )
    up_pause_s: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="Seconds between two steps up. Longer than a worker takes to start.",
    )
    up_step_max: int = Field(
        default=2, ge=1, le=WORKERS_MAX, description="Workers that one step adds at most."
    )
    down_after_s: float = Field(
        default=120.0,
        ge=0,
        le=86400,
        description=(
            "Seconds that fewer workers must have sufficed, without a gap. Too short pays for a "
            "start, with an empty cache, at each lull."
        ),
    )
    down_pause_s: float = Field(
        default=120.0,
        ge=0,
        le=86400,
        description="Seconds from any step to one down.",
    )
    down_step_max: int = Field(
        default=1, ge=1, le=WORKERS_MAX, description="Workers that one step takes away at most."
    )
    down_share: float = Field(
        default=0.7,
        gt=0,
        lt=1,
        description=(
            "Part of each bound that the remaining workers must stay below. Nearer to 1 uses fewer "
            "workers, and flaps sooner."
        ),
    )
    silent_s: float = Field(
        default=30.0,
        ge=5,
        le=3600,
        description=(
            "Age of a worker's figures from which they do not count. Without figures nothing is "
            "changed: silence is not idleness."
        ),
    )
    report_interval_s: float = Field(
        default=5.0,
        ge=0.5,
        le=10,
        description="Seconds between a worker's reports to Serve's controller.",
    )

    @model_validator(mode="after")
    def _reports_come_before_they_are_missed(self) -> Self:
        if self.silent_s < 2 * self.report_interval_s:
            message = (
                f"silent_s ({self.silent_s:g}) must be at least twice report_interval_s "
                f"({self.report_interval_s:g}): one late report is no silence"
            )
            raise ValueError(message)
        return self
