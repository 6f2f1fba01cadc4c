"""Each internal of Ray 2.60 that Headwater leans on, by name, without a cluster."""

from __future__ import annotations

import inspect

import pytest
from ray.serve._private import http_util, replica
from ray.serve._private.common import RunningReplicaInfo
from ray.serve.request_router import RequestRouter

from deployments.ingress.membership import MembershipRouter
from deployments.loopback import HOOK, bind_replicas_to_loopback

pytestmark = pytest.mark.contract


def test_a_replica_opens_its_port_through_the_function_that_we_replace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(
        replica, "add_port_to_grpc_server", lambda _server, address: opened.append(address) or 7
    )
    bind_replicas_to_loopback()
    assert replica.add_port_to_grpc_server(object(), "[::]:0") == 7
    assert opened == ["127.0.0.1:0"]
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in inspect.getsource(replica)


def test_the_hook_names_the_function() -> None:
    module, _, name = HOOK.rpartition(".")
    assert (module, name) == (
        bind_replicas_to_loopback.__module__,
        bind_replicas_to_loopback.__name__,
    )


def test_serve_asks_a_replica_for_its_application_and_its_metadata() -> None:
    assert replica.SERVE_BUILD_ASGI_APP_METHOD == "__serve_build_asgi_app__"
    assert "record_replica_metadata" in inspect.getsource(replica)
    assert "replica_metadata" in inspect.signature(RunningReplicaInfo).parameters
    assert hasattr(http_util, "ASGIAppReplicaWrapper")


def test_the_replica_router_is_told_of_replicas_by_the_methods_we_override() -> None:
    for name in ("update_replicas", "choose_replicas", "on_replica_actor_died"):
        assert callable(getattr(RequestRouter, name)), name
        assert name in vars(MembershipRouter), name
    assert "_deployment_id" in inspect.getsource(RequestRouter.__init__)


def test_ray_binds_loopback_when_told_that_there_are_no_other_machines() -> None:
    from ray._private import ray_constants, services

    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    assert "ENABLE_RAY_CLUSTER" in inspect.getsource(services.get_node_ip_address)
