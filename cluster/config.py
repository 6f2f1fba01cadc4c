"""The configuration: one immutable model per domain, each field with unit, bounds and trade-off.

Built by cluster/config_sources.py from defaults, one YAML file, the environment and flags. Read
by the commands and by the application builder, never changed after loading. It must not import
ray or vllm: `headwater config` answers at once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from cluster.config_keys import KEYS_FILE, KeysConfig
from cluster.config_links import LinksConfig
from cluster.config_scaling import ScalingConfig
from cluster.config_section import (
    AUTO,
    AUTO_OR_NUMBER,
    DRAIN_MARGIN_S,
    NUMBER,
    AutoValue,
    Section,
    unresolved,
)
from cluster.config_slab import SlabConfig
from cluster.config_tenants import TenantsConfig
from cluster.config_workers import WorkersConfig

BUNDLED_MODEL = "SmolLM2-135M-Instruct"
LOOPBACK = "127.0.0.1"
CPU_BLOCK_TOKENS = 32
MIB = 1 << 20
KV_MIB_MIN, KV_MIB_MAX = 16, 1 << 20
KV_SEQUENCE_TOKENS = 512
KV_MEMORY_SHARE = 0.25
PORT_MAX = 65535
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z,*]+")


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
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default=AUTO,
        description=(
            "Precision of weights and KV. auto: bfloat16 where every node's CPU computes it "
            "natively (amx_bf16, avx512_bf16, Arm's bf16), else float32; on GPUs the checkpoint's. "
            "float32 doubles weights and KV, and makes answers of different batchings equal."
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
    def resolved_dtype(self) -> str:
        """Never auto: cluster/auto_values.py has to come first. Raises ConfigError."""
        if self.dtype == AUTO:
            raise unresolved("model.dtype")
        return self.dtype

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
    kv_cache_mib: Annotated[
        AutoValue | Annotated[int, Field(ge=KV_MIB_MIN, le=KV_MIB_MAX), NUMBER], AUTO_OR_NUMBER
    ] = Field(
        default=AUTO,
        description=(
            "KV cache of one engine, in MiB. More holds more requests at once; "
            f"{BUNDLED_MODEL} takes 22.5 KiB a token in bfloat16. auto: one request of "
            f"model.max_model_len and {KV_SEQUENCE_TOKENS} tokens for each of max_num_seqs, of "
            f"which all engines of a node take at most {KV_MEMORY_SHARE:.0%} of its free memory, "
            "but always one request of full length."
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

    @property
    def kv_cache_bytes(self) -> int:
        """Never auto: cluster/auto_values.py has to come first. Raises ConfigError."""
        if self.kv_cache_mib == AUTO:
            raise unresolved("engine.kv_cache_mib")
        return self.kv_cache_mib * MIB

    @model_validator(mode="after")
    def _a_step_holds_its_requests(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            message = (
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each request takes a token a step"
            )
            raise ValueError(message)
        return self


class HttpConfig(Section):
    """The OpenAI-compatible endpoint."""

    host: str = Field(
        default=LOOPBACK,
        min_length=1,
        description=(
            "Address to listen on. Others than loopback let the network in: make API keys first "
            "(./headwater keys add)."
        ),
    )
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port; 0 takes a free one.")
    replicas: int = Field(
        default=1,
        ge=1,
        le=64,
        description=(
            "Ingresses, each with its own router and queue. On one node each has a port: `port` "
            "and those after it. Put a load balancer in front (helm/loadbalancer)."
        ),
    )
    drain_s: float = Field(
        default=60.0,
        ge=0,
        le=86400,
        description=(
            "Seconds in which an ingress that Serve takes away may finish its answers. What lasts "
            "longer is cut, since a stream cannot move to another ingress: as long as your longest "
            "answers where updates shall break none. Where all ends (stop), workers.drain_s bounds "
            "it too."
        ),
    )
    through: Literal["ingress", "proxy"] = Field(
        default="ingress",
        description=(
            "Who listens there: the ingress itself, or Serve's proxy, which adds 10 ms to a first "
            "token and passes a seventh of the tokens/s. On a running Ray cluster it is always the "
            "proxy, which Serve has on every node."
        ),
    )

    allowed_origins: tuple[Annotated[str, Field(description="One origin, or *.")], ...] = Field(
        default=(),
        description=(
            "Origins whose pages may use the API from a browser (CORS), as browsers send them: "
            '["http://localhost:3000"]. "*" allows every page, and without API keys any page that '
            "somebody opens could use the model. Empty: none. Operator routes are never open to "
            "pages."
        ),
    )

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                message = (
                    f"{origin!r} is no origin: scheme://host or scheme://host:port in lower case, "
                    'without a path, as in "http://localhost:3000"; or "*"'
                )
                raise ValueError(message)
        return value

    @property
    def kill_after_s(self) -> float:
        """Seconds that Serve lets an ingress finish."""
        return self.drain_s + DRAIN_MARGIN_S

    @property
    def ports(self) -> range:
        """Those that ingresses may listen on, on each node. With port 0 none is known yet."""
        return range(self.port, self.port + self.replicas)

    @model_validator(mode="after")
    def _ports_exist(self) -> Self:
        if self.port == 0 and self.replicas > 1:
            message = (
                f"port 0 takes one free port, but {self.replicas} ingresses need as many in a "
                "row: name the first"
            )
            raise ValueError(message)
        if self.ports[-1] > PORT_MAX:
            message = (
                f"{self.replicas} ingresses from port {self.port} on would need port "
                f"{self.ports[-1]}: the last there is is {PORT_MAX}"
            )
            raise ValueError(message)
        return self


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
        description=(
            "Bounds what failures may cost: a request has 2 + 2 x this many attempts, of which a "
            "resume on another worker takes one, or two where its prompt is computed anew."
        ),
    )
    poison_worker_deaths: int = Field(
        default=2,
        ge=1,
        le=100,
        description=(
            "A request that was at this many workers as they died is refused. One that had got 32 "
            "tokens from a worker has not brought its death: counting begins anew."
        ),
    )
    request_body_max_bytes: int = Field(
        default=8 * MIB,
        ge=1024,
        le=32 * MIB,  # frames.REQUEST_BODY_BYTES_MAX; the doctor reads this where that is broken
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
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    links: LinksConfig = Field(default_factory=LinksConfig)
    slab: SlabConfig = Field(default_factory=SlabConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    keys: KeysConfig = Field(default_factory=KeysConfig)
    tenants: TenantsConfig = Field(default_factory=TenantsConfig)
    state: StateConfig = Field(default_factory=StateConfig)

    @property
    def drain_s_max(self) -> float:
        """The longest that Serve lets a replica finish."""
        return max(self.http.kill_after_s, self.workers.kill_after_s)

    @field_validator("tenants")
    @classmethod
    def _a_key_has_one_tenant(cls, tenants: TenantsConfig, info: ValidationInfo) -> TenantsConfig:
        keys = info.data.get("keys")
        if tenants.keys_file is not None and keys is not None and keys.file is not None:
            message = (
                "keys_file cannot be beside keys.file, where a key's tenant is written: "
                "./headwater keys add NAME --tenant TENANT"
            )
            raise ValueError(message)
        return tenants


def keys_file_of(config: Config) -> Path:
    """The file of API keys, which need not be there."""
    return (config.keys.file or config.state.dir / KEYS_FILE).absolute()


def keys_are_set(config: Config) -> bool:
    """Whether a cluster that starts now is closed: a file that is named has to be there."""
    return config.keys.file is not None or keys_file_of(config).exists()
