"""Who the workers are: Serve's replica routing, listened to from inside the ingress.

Serve calls ``update_replicas`` in the ingress process whenever replicas of a worker deployment
come or go, within 0.2 s. No request ever goes through this router. Read by worker_links.
Source: ray/serve/_private/request_router (Ray 2.60). Serve ships this class by value, so shared
state is imported inside the methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.serve.request_router import RequestRouter

if TYPE_CHECKING:
    from ray.serve._private.common import ReplicaID
    from ray.serve._private.request_router.common import PendingRequest
    from ray.serve._private.request_router.replica_wrapper import RunningReplica


@dataclass(frozen=True, slots=True)
class Member:
    """A worker replica as Serve knows it, and where its link listens."""

    worker: str
    deployment: str
    role: str
    model: str
    host: str
    port: int
    pid: int
    node: str


class Members:
    """The present workers of all deployments that this ingress listens to."""

    def __init__(self) -> None:
        self._by_deployment: dict[str, dict[str, Member]] = {}
        self._listeners: list[Callable[[], None]] = []

    def replace(self, deployment: str, members: list[Member]) -> None:
        """Set a deployment's workers; tells the listeners when that changes anything."""
        new = {member.worker: member for member in members}
        if self._by_deployment.get(deployment) != new:
            # A new dict: the ingress's loop may be walking the old one.
            self._by_deployment = {**self._by_deployment, deployment: new}
            for listener in self._listeners:
                listener()

    def present(self) -> dict[str, Member]:
        """All workers by id."""
        return {w: m for group in self._by_deployment.values() for w, m in group.items()}

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every change, in the thread where Serve routes.

        Returns what ends that.
        """
        self._listeners = [*self._listeners, listener]

        def stop() -> None:
            self._listeners = [known for known in self._listeners if known is not listener]

        return stop


MEMBERS = Members()


class MembershipRouter(RequestRouter):
    """Listens; does not choose."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve with all running replicas of one deployment."""
        super().update_replicas(replicas)
        from deployments.ingress import membership  # noqa: PLW0406 - the process's own

        deployment = self._deployment_id.name
        members = [
            membership.member_of(deployment, dict(replica.replica_metadata))
            for replica in replicas
            if replica.replica_metadata
        ]
        membership.MEMBERS.replace(deployment, members)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Any replica, shuffled by Serve; only operators' handle calls come here."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [list(candidate_replicas)]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """The link notices a death sooner; nothing to add."""
        super().on_replica_actor_died(replica_id)


def member_of(deployment: str, metadata: dict[str, Any]) -> Member:
    """Read what EngineWorker.record_replica_metadata wrote."""
    return Member(
        worker=str(metadata["worker"]),
        deployment=deployment,
        role=str(metadata["role"]),
        model=str(metadata["model"]),
        host=str(metadata["host"]),
        port=int(metadata["port"]),
        pid=int(metadata["pid"]),
        node=str(metadata["node"]),
    )
