"""InprocessEngine with an agent: blocks leave it, come back to it, and resumed tokens' ones too.

One engine plays both sides: it forgets its own cache between them. The connector itself is tested
in test_connector_*.py; here it is the engine that installs it and passes it its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.agent import AgentServer
from tests.contract.engine_harness import SERVED_MODEL, Harness, running_engine
from tests.equality import check_tokens

pytestmark = [
    pytest.mark.contract,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]

WAIT_S = 30.0


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


@pytest.fixture(autouse=True)
def nothing_stays_leased(agent: AgentServer, harness: Harness) -> Iterator[None]:
    yield
    agent.validate()
    ledger = agent.ledger(SERVED_MODEL)
    assert (ledger.leased_slots, ledger.filling) == (0, 0)


def test_the_agent_is_told_the_namespace_and_layout_that_the_engine_states(
    harness: Harness,
) -> None:
    session = harness.engine._scheduler.get_kv_connector().session
    assert session.namespace == harness.engine.namespace
    assert session.layout == harness.engine.layout


def test_a_resumed_request_loads_prompt_and_output_blocks_and_goes_on_exactly(
    harness: Harness,
) -> None:
    engine = harness.engine
    prompt = harness.long_prompt(300)
    given = {"max_tokens": 90, "ignore_eos": True, "temperature": 1.0, "seed": 6}
    whole = harness.answer(prompt, harness.params(**given)).reference
    harness.forget()
    before = engine.counts().computed_tokens_total, engine.kv_stats().blocks_loaded_total
    rest = harness.answer(prompt, harness.params(**given), whole.until(70).tokens)
    check_tokens(rest.tokens, whole.after(70))
    computed = engine.counts().computed_tokens_total - before[0]
    loaded = engine.kv_stats().blocks_loaded_total - before[1]
    assert loaded == 370 // 32
    assert computed == 370 - loaded * 32 + 19


def test_a_handoff_is_leased_until_it_is_ended(harness: Harness, agent: AgentServer) -> None:
    engine = harness.engine
    request = harness.request(harness.long_prompt(200), harness.params(max_tokens=1))
    engine.add(request, (), {"handoff": "hand-over/1", "publish_handoff": True})
    answer = harness.run()[request.request_id]
    assert answer.outputs[-1].kv_transfer_params["headwater"]["published_blocks"] >= 0
    assert agent.ledger(SERVED_MODEL).leased_slots == 200 // 32
    engine.end_handoffs(["hand-over/1", "hand-over/unknown"])
    # The books are asked over the same socket, hence after the message above.
    store = engine._scheduler.get_kv_connector().session.store()
    assert store.lease_prefix("look", (), 1.0).result(timeout_s=WAIT_S) == ()
    assert agent.ledger(SERVED_MODEL).leased_slots == 0


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33])
def test_a_prompt_of_about_a_block_is_handed_over_with_nothing_to_wait_for(
    harness: Harness, agent: AgentServer, length: int
) -> None:
    engine, prompt = harness.engine, harness.long_prompt(400)[100 + length :][:length]
    whole = harness.answer(prompt, harness.params(max_tokens=20, ignore_eos=True)).reference
    harness.forget()
    agent.clear(SERVED_MODEL)
    key = f"hand-over/of {length}"
    prefill = harness.request(prompt, harness.params(max_tokens=1))
    engine.add(prefill, (), {"handoff": key, "publish_handoff": True})
    first = harness.run()[prefill.request_id].tokens
    check_tokens(first, whole.until(1))
    harness.forget()
    before = engine.kv_stats().blocks_loaded_total
    decode = harness.request(prompt, harness.params(max_tokens=20, ignore_eos=True))
    engine.add(decode, whole.until(1).tokens, {"handoff": key, "publish_handoff": False})
    rest = harness.run()[decode.request_id].tokens
    check_tokens(rest, whole.after(1))
    assert engine.kv_stats().blocks_loaded_total - before == length // 32
    store = engine._scheduler.get_kv_connector().session.store()
    store.lease_prefix("look", (), 1.0).result(timeout_s=WAIT_S)


def test_the_wait_for_publishing_is_told_for_the_last_step(harness: Harness) -> None:
    engine = harness.engine
    request = harness.request(harness.long_prompt(120)[::-1], harness.params(max_tokens=1))
    engine.add(request, (), {"handoff": "hand-over/2", "publish_handoff": True})
    result = engine.step()
    assert result.outputs
    assert engine.publish_wait_s() > 0
    harness.run()
    engine.end_handoffs(["hand-over/2"])
    store = engine._scheduler.get_kv_connector().session.store()
    store.lease_prefix("look", (), 1.0).result(timeout_s=WAIT_S)


@pytest.mark.parametrize("good", [None, 0, 3])
def test_cached_tokens_are_those_that_were_really_loaded_also_after_a_failed_load(
    harness: Harness, good: int | None
) -> None:
    prompt = harness.long_prompt(330)[::-1]
    whole = harness.answer(prompt, harness.params(max_tokens=4)).reference
    harness.forget()
    session = harness.engine._scheduler.get_kv_connector().session
    if good is not None:
        session.faults.fail_next(1, skip=good)
    before = harness.engine.counts().computed_tokens_total
    again = harness.answer(prompt, harness.params(max_tokens=4))
    computed = harness.engine.counts().computed_tokens_total - before - 3
    check_tokens(again.tokens, whole)
    cached = {None: 330 // 32, 0: 0, 3: 3}[good] * 32
    stats = again.outputs[0].prefill_stats
    assert (stats.num_cached_tokens, stats.num_external_cached_tokens) == (cached, cached)
    assert stats.num_computed_tokens == computed == 330 - cached


def test_a_healthy_connector_reports_no_failure(harness: Harness) -> None:
    before = harness.engine.kv_stats().load_failures_total
    harness.answer(harness.long_prompt(90), harness.params(max_tokens=1))
    stats = harness.engine.kv_stats()
    assert not stats.degraded
    assert stats.load_failures_total == before
    assert stats.model == SERVED_MODEL
