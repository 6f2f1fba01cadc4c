"""Configuration of slabs, and of blocks between nodes. Part of cluster/config.py."""

from __future__ import annotations

from pydantic import Field

from cluster.config_section import Section


class SlabConfig(Section):
    """The node's shared memory for KV blocks, one slab a model and node."""

    mib: int = Field(
        default=512,
        ge=16,
        le=1 << 22,
        description=(
            "Size in MiB; memory is used as blocks are written. More keeps more prefixes, for "
            "hand-offs and for later turns."
        ),
    )
    lease_ttl_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Seconds that a load may hold its blocks. Longer than any load takes.",
    )
    handoff_ttl_s: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description=(
            "Seconds that blocks wait for the decode worker. Too short makes it compute them "
            "again; too long keeps an abandoned request's blocks."
        ),
    )
    pull_timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description=(
            "Seconds that blocks of another node may take; what has not come by then is computed "
            "again. Longer than the longest prompt's blocks take on your network."
        ),
    )
    pull_streams: int = Field(
        default=1,
        ge=1,
        le=16,
        description=(
            "TCP connections to each peer that carry blocks. More cost more CPU at both ends and "
            "help where one cannot fill the network."
        ),
    )
    prefetches_max: int = Field(
        default=8,
        ge=0,
        le=256,
        description=(
            "Hand-offs of another node whose blocks are brought over while prefill still computes, "
            "at a time; 0 is off."
        ),
    )
    audit_share: float = Field(
        default=0.001,
        ge=0,
        le=1,
        description="Share of greedy requests run again without reuse, and compared; 0 is off.",
    )
