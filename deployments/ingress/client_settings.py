"""Settings of the ingress's engine client; light, because they are built where nothing is served.

Called by cluster/application (which fills them in) and engine_client (which obeys them).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.flow.flow_types import FlowLimits
from deployments.flow.shadow_audit import AuditSettings
from deployments.links.link import LinkSettings
from deployments.node.directory_actor import DirectorySettings


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What the shell needs to know.

    Attributes:
        expected_namespace: fields that every worker must have, by name.
        reconnect_s, refused_retry_s: waits before a lost or refused link is tried again.
        stall_s: a worker whose engine has not turned for longer gets no new work.

    """

    model: str
    block_size: int
    context_tokens_max: int
    expected_namespace: dict[str, str]
    directory: DirectorySettings
    limits: FlowLimits
    links: LinkSettings = field(default_factory=LinkSettings)
    reconnect_s: float = 0.5
    refused_retry_s: float = 15.0
    stall_s: float = 20.0
    audits: AuditSettings = field(default_factory=AuditSettings)
