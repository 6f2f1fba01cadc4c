"""Members, welcomes and requests for tests of what the router is told of workers."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from deployments.ingress.membership import Member
from deployments.links import frames
from router.decision import RouteRequest
from tests.unit.deployments.link_world import WELCOME

MEMBER = Member(
    worker="w1",
    deployment="DecodeWorker",
    role="decode",
    model="m",
    host="127.0.0.1",
    port=1,
    pid=7,
    node="node",
)


def member(worker: str, role: str, node: str = "node") -> Member:
    return replace(MEMBER, worker=worker, role=role, node=node)


def welcome_of(of: Member) -> frames.Welcome:
    return msgspec.structs.replace(WELCOME, worker=of.worker, role=of.role, node=of.node)


def request_of(name: str, *, prompt_tokens: int = 8) -> RouteRequest:
    return RouteRequest(
        request_id=name, model="m", prompt_tokens=prompt_tokens, block_hashes=(), max_tokens=8
    )
