"""The configuration: one immutable model per domain, each field with unit, bounds and trade-off.

Built by cluster/config_sources.py from defaults, one YAML file, the environment and flags. Read
by the commands and by the application builder, never changed after loading. It must not import
ray or vllm: `headwater config` answers at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from cluster.config_links import LinksConfig
from cluster.config_section import Section
from cluster.config_slab import SlabConfig
from cluster.config_tenants import TenantsConfig

BUNDLED_MODEL = "SmolLM2-135M-Instruct"
LOOPBACK = "127.0.0.1"
CPU_BLOCK_TOKENS = 32
RAY_RESOURCES = frozenset({"", "CPU", "GPU", "memory", "object_store_memory"})
MIB = 1 << 20


def default_state_dir() -> Path:
    """XDG_STATE_HOME/headwater."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "headwater"


def default_cache_dir() -> Path:
    """XDG_CACHE_HOME/headwater."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater"


class ModelConfig(Section):
    """Which model is served, and in which precision."""

    path_or_name: str = Field(
        default=BUNDLED_MODEL,
        min_length=1,
        description=(
            "Folder with a Hugging Face model, a hub name (owner/name), or the bundled "
            f"{BUNDLED_MODEL}, which needs no network."
        ),
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        description="Name that clients use; without one, the last part of path_or_name.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description="Commit, tag or branch of a hub model. Name a commit, or a restart may differ.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16",
        description=(
            "Precision of weights and KV. float32 doubles both and makes answers of different "
            "batchings equal."
        ),
    )
    max_model_len: int = Field(
        default=8192,
        ge=64,
        le=1 << 20,
        description=(
            "Longest request in tokens, prompt and output together. Each engine's KV must hold "
            "at least one such request (engine.kv_cache_mib)."
        ),
    )

    @property
    def served(self) -> str:
        """The name that clients use."""
        return self.served_name or Path(self.path_or_name).name


class EngineConfig(Section):
    """vLLM's engine, the same for both roles."""

    block_size_tokens: int = Field(
        default=CPU_BLOCK_TOKENS,
        ge=16,
        le=256,
        description=(
            "Tokens in a KV block: a multiple of 32 on CPUs. Smaller blocks share more of a "
            "prefix, and cost more bookkeeping."
        ),
    )
    kv_cache_mib: int = Field(
        default=256,
        ge=16,
        le=1 << 20,
        description=(
            "KV cache of one engine, in MiB. More holds more requests at once; "
            f"{BUNDLED_MODEL} takes 22.5 KiB a token in bfloat16."
        ),
    )
    max_num_seqs: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Requests in one engine step. More raises throughput and every step's time.",
    )
    max_num_batched_tokens: int = Field(
        default=1024,
        ge=32,
        le=1 << 17,
        description=(
            "Tokens in one engine step; longer prompts are computed in several steps. More "
            "shortens the prefill, and makes running streams wait longer."
        ),
    )
    enforce_eager: bool = Field(
        default=True,
        description=(
            "Do not compile the model. Compiling gave 43 % more tokens/s on a CPU for 71 s more "
            "of start, and needs a compiler."
        ),
    )

    @model_validator(mode="after")
    def _a_step_holds_its_requests(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            message = (
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each request takes a token a step"
            )
            raise ValueError(message)
        return self


class WorkerRoleConfig(Section):
    """How many workers one role has, and on which nodes they may run."""

    replicas: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Workers of this role, each one engine in one process.",
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
    cores_per_worker: int = Field(
        default=1,
        ge=1,
        le=256,
        description=(
            "Cores, and so compute threads, of one worker, or of one of its ranks. Workers that "
            "share cores slow each other down by far more than half."
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
    stall_s: float = Field(
        default=20.0,
        gt=0,
        le=3600,
        description=(
            "Seconds without a turn of its engine after which a worker gets no new requests, and "
            "does not count as ready, until it turns again. It must exceed the longest engine step "
            "(1 to 2 s for 1024 prompt tokens on one core, more with a larger "
            "engine.max_num_batched_tokens); lower notices a stuck engine sooner. A worker whose "
            "whole process is silent is given up after 10 s, whatever this is."
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

    @property
    def cores_each(self) -> int:
        """Cores of one worker, all its ranks together."""
        return self.cores_per_worker * self.tensor_parallel_size

    @model_validator(mode="after")
    def _replaced_after_it_is_avoided(self) -> Self:
        if self.stall_replace_s < self.stall_s:
            message = (
                f"stall_replace_s ({self.stall_replace_s:g}) must be at least stall_s "
                f"({self.stall_s:g}): a worker is avoided before it is replaced"
            )
            raise ValueError(message)
        return self


class HttpConfig(Section):
    """The OpenAI-compatible endpoint."""

    host: str = Field(
        default=LOOPBACK,
        min_length=1,
        description="Address to listen on. Others than loopback let the network in, keys or not.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port; 0 takes a free one.")
    through: Literal["ingress", "proxy"] = Field(
        default="ingress",
        description=(
            "Who listens there: the ingress itself, or Serve's proxy, which adds 10 ms to a first "
            "token and passes a seventh of the tokens/s. On a running Ray cluster it is always the "
            "proxy, which Serve has on every node."
        ),
    )


class RayConfig(Section):
    """The Ray cluster: one that is started here, or a running one."""

    address: str | None = Field(
        default=None,
        min_length=1,
        description="A running cluster (host:port). Without one, a local cluster is started.",
    )
    dashboard_host: str = Field(
        default=LOOPBACK,
        min_length=1,
        description=(
            "Address of the dashboard of a cluster that is started here. Whoever reaches the "
            "dashboard can run code: leave it on loopback."
        ),
    )
    dashboard_port: int = Field(
        default=8265, ge=0, le=65535, description="The dashboard's TCP port; 0 takes a free one."
    )


class RouterConfig(Section):
    """Choice of workers. The cost model's other constants are fitted from what workers report."""

    caused_weight_idle: float = Field(
        default=0.3,
        ge=0,
        le=10,
        description=(
            "Worth of a ms of delay to other requests against a ms of this one's own, on an idle "
            "cluster. More keeps prompts away from streams that run."
        ),
    )
    caused_weight_full: float = Field(
        default=1.0,
        ge=0,
        le=10,
        description="The same when every decode slot is taken; in between, in proportion.",
    )
    expected_output_tokens: int = Field(
        default=128,
        ge=1,
        le=1 << 20,
        description="Tokens that a request is taken to generate, if its max_tokens is not lower.",
    )


class LimitsConfig(Section):
    """What the ingress refuses, and when a request is given up."""

    queue_max_requests: int = Field(
        default=64,
        ge=1,
        le=1 << 20,
        description=(
            "Requests waiting in one ingress. One more is refused with 429 and an estimate; a "
            "longer queue only lengthens the wait."
        ),
    )
    resume_max: int = Field(
        default=3,
        ge=0,
        le=100,
        description="Times that one request is resumed on another worker after a failure.",
    )
    poison_worker_deaths: int = Field(
        default=2,
        ge=1,
        le=100,
        description="A request that was running on this many workers as they died is refused.",
    )
    request_body_max_bytes: int = Field(
        default=8 * MIB,
        ge=1024,
        le=1 << 30,
        description="Largest request body in bytes; a longer one is refused with 413.",
    )


class StateConfig(Section):
    """Folders of this machine."""

    dir: Path = Field(
        default_factory=default_state_dir,
        description="Sockets, logs, request records and the running cluster's address.",
    )
    cache_dir: Path = Field(
        default_factory=default_cache_dir,
        description="Prepared models. Safe to delete while nothing runs.",
    )


class Config(Section):
    """The whole configuration."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    workers: WorkersConfig = Field(default_factory=WorkersConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    links: LinksConfig = Field(default_factory=LinksConfig)
    slab: SlabConfig = Field(default_factory=SlabConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    tenants: TenantsConfig = Field(default_factory=TenantsConfig)
    state: StateConfig = Field(default_factory=StateConfig)
