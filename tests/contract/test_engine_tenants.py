"""Two tenants on one engine and one slab: what the first leaves behind, the second cannot name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.edge.tenants import Tenant, Tenants, salted
from kvcache.agent import AgentServer
from tests.contract.engine_harness import BLOCK_SIZE, SERVED_MODEL, Harness, running_engine

pytestmark = [pytest.mark.contract, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TENANTS = Tenants(b"the secret of a cluster")
ANN, BEN = (TENANTS.of([(b"authorization", f"Bearer {who}".encode())]) for who in ("ann", "ben"))
TOKENS = 7 * BLOCK_SIZE + 6


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentServer]:
    folder: Path = tmp_path_factory.mktemp("agent")
    agent = AgentServer(str(folder / "agent.sock"), slab_bytes=128 << 20)
    yield agent
    agent.validate()
    agent.close()


@pytest.fixture(scope="module")
def harness(agent: AgentServer, small_model: Path) -> Iterator[Harness]:
    with running_engine(model_path=str(small_model), agent_socket=agent.socket_path) as harness:
        yield harness


class Node:
    """The engine and its slab, emptied."""

    def __init__(self, agent: AgentServer, harness: Harness) -> None:
        self.agent, self.harness = agent, harness
        harness.forget()
        harness.engine.take_cache_events()
        if SERVED_MODEL in agent.models():
            agent.clear(SERVED_MODEL)

    def ask(self, prompt: list[int], tenant: Tenant, salt: str | None = None) -> tuple[int, int]:
        """(tokens computed of the prompt, blocks loaded) by an engine that forgot its own cache."""
        engine = self.harness.engine
        before = engine.counts().computed_tokens_total, engine.kv_stats().blocks_loaded_total
        params: Any = self.harness.params(max_tokens=1)
        request = self.harness.request(prompt, params, cache_salt=salted(tenant, salt))
        engine.add(request)
        self.harness.run()
        now = engine.counts().computed_tokens_total, engine.kv_stats().blocks_loaded_total
        return now[0] - before[0], now[1] - before[1]

    def slab(self) -> set[bytes]:
        """The names in the slab, as the directory would hear them."""
        return set(self.agent.snapshot_events(SERVED_MODEL).hashes)


@pytest.fixture
def node(agent: AgentServer, harness: Harness) -> Node:
    return Node(agent, harness)


def names(prompt: list[int], tenant: Tenant, salt: str | None = None) -> set[bytes]:
    """As the ingress names them for the router."""
    from deployments.engine.hashing import block_hashes

    return set(block_hashes(prompt, BLOCK_SIZE, salted(tenant, salt)))


def test_slab_engine_cache_and_events_hold_the_names_of_the_tenant_and_no_others(
    node: Node,
) -> None:
    prompt = node.harness.long_prompt(TOKENS)
    assert node.ask(prompt, ANN) == (TOKENS, 0)
    hers = names(prompt, ANN)
    assert node.slab() == hers
    assert set(node.harness.engine.cache_snapshot()) == hers
    his = names(prompt, BEN) | names(prompt, TENANTS.nobody) | names(prompt, BEN, "summer")
    assert not hers & his


@pytest.mark.parametrize("where", ["slab", "own cache"])
def test_the_engine_reuses_a_prompt_for_its_own_tenant_alone(node: Node, where: str) -> None:
    prompt = node.harness.long_prompt(TOKENS)

    def ask(tenant: Tenant, salt: str | None = None) -> tuple[int, int]:
        if where == "slab":
            node.harness.forget()
        return node.ask(prompt, tenant, salt)

    hit = (6, 7) if where == "slab" else (6, 0)
    cold = (TOKENS, 0)
    assert ask(ANN) == cold
    assert ask(ANN) == hit
    for tenant, salt in (
        (BEN, None),
        (TENANTS.nobody, None),
        (BEN, salted(ANN, None)),
        (TENANTS.nobody, salted(ANN, None)),
        (ANN, "summer"),
        (BEN, "summer"),
    ):
        assert ask(tenant, salt) == cold
        assert ask(tenant, salt) == hit
    assert ask(ANN) == hit
