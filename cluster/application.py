"""The Serve application, built from a configuration: the same on a laptop, a cluster, the chart.

``build`` is the import target `cluster.application:build`. Called by the serve command and by
Serve itself. It imports no engine: replicas do.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import cloudpickle, serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.deployment import Application

import deployments.scaling
from cluster.auto_values import Choices, configured
from cluster.config import MIB, Config, keys_are_set, keys_file_of
from cluster.config_scaling import ScalingConfig
from cluster.config_workers import WorkerRoleConfig
from cluster.ports import is_behind_proxy
from deployments.edge.front_door import DoorAddress
from deployments.edge.key_file import KeySettings
from deployments.engine.settings import EngineSettings, FrontEndSettings
from deployments.flow.flow_types import FlowLimits, Role
from deployments.flow.shadow_audit import AuditSettings, tie_nats_of
from deployments.ingress.client_settings import ClientSettings
from deployments.ingress.ingress import Ingress, IngressSettings
from deployments.links.listening import ListenSettings
from deployments.node.directory_actor import DirectorySettings
from deployments.node.node_agent import AgentSettings
from deployments.scaling.policy import ScalingRules
from deployments.scaling.signals import Bounds
from deployments.workers.worker import EngineWorker, WorkerSettings
from router.settings import AdmissionSettings, RouterSettings

INGRESS_ONGOING_MAX = 10_000
HEALTH_PERIOD_S = 2.0
SCALING_POLICY = "deployments.scaling.serve_policy:RoleScaling"  # Serve takes it by name


class BuildArguments(BaseModel):
    """Arguments of the application as Serve passes them.

    ``model_path`` is the prepared folder on every node; ``secret_file`` likewise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: Config
    model_path: str
    secret_file: str
    app: str = "headwater"
    # How the serve command came to the values that a configuration may leave to it.
    choices: Choices = {}
    py_executable: str | None = None  # what Ray starts replicas with; None: with Python
    # For tests: raises no limits, opens no doors; passed to the connector as it is.
    connector_extra: dict[str, float | str | bool] = {}


def build(args: BuildArguments) -> Application:
    """The application: ingress over prefill and decode workers."""
    config = args.config
    workers = {role: _worker(args, role) for role in Role}
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=config.http.replicas,
        max_ongoing_requests=INGRESS_ONGOING_MAX,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=config.http.kill_after_s,
        ray_actor_options={"num_cpus": 0, **_started_by(args)},
    )(serve.ingress()(Ingress))
    settings = IngressSettings(
        front_end=FrontEndSettings(
            model_path=args.model_path,
            served_model=config.model.served,
            dtype=config.model.resolved_dtype,
            max_model_len=config.model.max_model_len,
            block_size=config.engine.block_size_tokens,
            engine_requests_max=config.limits.queue_max_requests + _slots(config),
        ),
        client=_client(args),
        secret_file=args.secret_file,
        router=RouterSettings(
            caused_weight_idle=config.router.caused_weight_idle,
            caused_weight_full=config.router.caused_weight_full,
            expected_output_tokens=config.router.expected_output_tokens,
        ),
        admission=AdmissionSettings(queue_max=config.limits.queue_max_requests),
        body_bytes_max=config.limits.request_body_max_bytes,
        door=_door(config),
        drain_s=config.http.drain_s,
        allowed_origins=config.http.allowed_origins,
        is_scaled=config.workers.prefill.scales or config.workers.decode.scales,
        tenant_header=config.tenants.header or "",
        tenant_keys_file=str(config.tenants.keys_file or ""),
        chosen={
            key: asdict(choice) for key, choice in (args.choices or configured(config)).items()
        },
        keys=KeySettings(
            file=str(keys_file_of(config)),
            required=keys_are_set(config),
            reload_s=config.keys.reload_s,
        ),
    )
    return ingress.bind(settings, workers[Role.PREFILL], workers[Role.DECODE])


def _door(config: Config) -> DoorAddress | None:
    if is_behind_proxy(config):
        return None
    return DoorAddress(config.http.host, config.http.port, config.http.replicas)


def _slots(config: Config) -> int:
    """Requests that all workers run at once."""
    workers = config.workers.prefill.most + config.workers.decode.most
    return workers * config.engine.max_num_seqs


def _worker(args: BuildArguments, role: Role) -> Application:
    config = args.config
    count = {Role.PREFILL: config.workers.prefill, Role.DECODE: config.workers.decode}[role]
    cores = config.workers.cores_of(count)
    deployment = serve.deployment(
        name=f"{role.value.capitalize()}Worker",
        **_size(args, role, count),
        max_ongoing_requests=1000,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=config.workers.kill_after_s,
        ray_actor_options={
            "num_cpus": cores,
            "resources": dict(count.resources),
            **_started_by(args),
        },
        request_router_config=RequestRouterConfig(
            request_router_class="deployments.ingress.membership:MembershipRouter"
        ),
    )(EngineWorker)
    links = ListenSettings(config.links.host or "", config.links.advertised_host or "")
    settings = WorkerSettings(
        engine=_engine(args, role),
        agent=AgentSettings(
            app=args.app,
            slab_bytes=config.slab.mib * MIB,
            secret_file=args.secret_file,
            links=links,
            directory=DirectorySettings(app=args.app),
        ),
        secret_file=args.secret_file,
        links=links,
        queue_max=config.limits.queue_max_requests,
        pin_cores=config.workers.pin_cores,
        cores=cores,
        stall_s=config.workers.stall_replace_s,
        drain_s=config.workers.drain_s,
    )
    return deployment.bind(settings)


def _started_by(args: BuildArguments) -> dict[str, Any]:
    """Of Ray's options for a replica: what it is started with."""
    return {"runtime_env": {"py_executable": args.py_executable}} if args.py_executable else {}


def _size(args: BuildArguments, role: Role, count: WorkerRoleConfig) -> dict[str, Any]:
    """How many replicas, as Serve takes it: a number, or bounds and who decides."""
    if not count.scales:
        return {"num_replicas": count.replicas}
    scaling = args.config.scaling
    rules = ScalingRules(
        replicas_min=count.least,
        replicas_max=count.most,
        bounds=Bounds(
            ttft_s=scaling.ttft_ms / 1e3,
            waiting_max=scaling.waiting_max,
            busy_max=scaling.busy_max,
            tpot_s=scaling.tpot_ms / 1e3,
            kv_max=scaling.kv_max,
            slots_max=scaling.slots_max,
        ),
        up_after_s=scaling.up_after_s,
        down_after_s=scaling.down_after_s,
        up_pause_s=scaling.up_pause_s,
        down_pause_s=scaling.down_pause_s,
        up_step_max=scaling.up_step_max,
        down_step_max=scaling.down_step_max,
        down_share=scaling.down_share,
        silent_s=scaling.silent_s,
    )
    kwargs = {"app": args.app, "role": role.value, "rules": asdict(rules)}
    return {"autoscaling_config": _autoscaling(count, scaling, kwargs)}


def _autoscaling(
    count: WorkerRoleConfig, scaling: ScalingConfig, kwargs: dict[str, Any]
) -> AutoscalingConfig:
    with warnings.catch_warnings(), _by_value(deployments.scaling):
        # Serve would have the interval in its environment, for all applications alike.
        warnings.filterwarnings("ignore", ".*metrics_interval_s", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=count.least,
            max_replicas=count.most,
            initial_replicas=count.replicas,
            policy=AutoscalingPolicy(policy_function=SCALING_POLICY, policy_kwargs=kwargs),
            # The policy has delays of its own, which know why.
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            metrics_interval_s=scaling.report_interval_s,
            look_back_period_s=max(scaling.silent_s, 2 * scaling.report_interval_s),
        )


@contextlib.contextmanager
def _by_value(package: ModuleType) -> Iterator[None]:
    """Meanwhile pickled with all its code: a Serve that others started cannot import ours."""
    cloudpickle.register_pickle_by_value(package)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(package)


def _engine(args: BuildArguments, role: Role) -> EngineSettings:
    config = args.config
    return EngineSettings(
        model_path=args.model_path,
        served_model=config.model.served,
        role=role.value,
        dtype=config.model.resolved_dtype,
        max_model_len=config.model.max_model_len,
        block_size=config.engine.block_size_tokens,
        kv_cache_bytes=config.engine.kv_cache_bytes,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        enforce_eager=config.engine.enforce_eager,
        tensor_parallel_size=config.workers.tensor_parallel_size,
        connector_extra={
            "lease_ttl_s": config.slab.lease_ttl_s,
            "handoff_ttl_s": config.slab.handoff_ttl_s,
            "pull_timeout_s": config.slab.pull_timeout_s,
            "pull_streams": config.slab.pull_streams,
            "prefetches_max": config.slab.prefetches_max,
            "secret_file": args.secret_file,
            **args.connector_extra,
        },
    )


def _client(args: BuildArguments) -> ClientSettings:
    config = args.config
    return ClientSettings(
        model=config.model.served,
        block_size=config.engine.block_size_tokens,
        context_tokens_max=config.model.max_model_len,
        expected_namespace={
            "model": config.model.served,
            "block_size": str(config.engine.block_size_tokens),
            "dtype": config.model.resolved_dtype,
            "max_model_len": str(config.model.max_model_len),
            "tensor_parallel_size": str(config.workers.tensor_parallel_size),
        },
        directory=DirectorySettings(app=args.app),
        limits=FlowLimits(
            worker_deaths_max=config.limits.poison_worker_deaths,
            attempts_max=2 + 2 * config.limits.resume_max,
        ),
        stall_s=config.workers.stall_s,
        audits=AuditSettings(
            share=config.slab.audit_share, tie_nats=tie_nats_of(config.model.resolved_dtype)
        ),
    )
