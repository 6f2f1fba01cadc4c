"""An engine of two tensor-parallel ranks: its tokens, its blocks in the slab, and its failures.

A small Llama with random weights and 4 KV heads, float32, vLLM's own ranks in processes of their
own. One engine plays both sides of a hand-off: it forgets its own cache between them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvcache.agent import AgentServer
from kvcache.errors import RegistrationRefused
from tests.contract.engine_harness import BLOCK_SIZE, SERVED_MODEL, Harness, running_engine
from tests.contract.tiny_models import make_model
from tests.equality import Reference, check_tokens
from tests.waiting import wait_until

pytestmark = [pytest.mark.contract, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

RANKS = 2
BLOCKS = 9
TOKENS = BLOCKS * BLOCK_SIZE + 5
OUTPUT = 20
SEEDED = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 6}
FAILED_BLOCK = 4
WAIT_S = 30.0


def prompt(number: int, tokens: int = TOKENS) -> list[int]:
    return [(7919 * (i + 1) * (number + 1)) % 40_000 for i in range(tokens)]


def two_ranks(model: Path, agent: AgentServer) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[:RANKS]
    return {
        "model_path": str(model),
        "tensor_parallel_size": RANKS,
        "rank_cores": tuple(cores) if len(cores) == RANKS else (),
        "core": None,
        "kv_cache_bytes": 16 << 20,
        "agent_socket": agent.socket_path,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "Llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Reference]:
    """What an engine of one rank answers to prompts 0 and 1, and with a seed to prompt 2."""
    with running_engine(model_path=str(model), kv_cache_bytes=16 << 20) as one:
        greedy = {"max_tokens": OUTPUT, "ignore_eos": True}
        asked = (greedy, greedy, SEEDED)
        return [
            one.answer(prompt(n), one.params(**params)).reference for n, params in enumerate(asked)
        ]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentServer]:
    folder: Path = tmp_path_factory.mktemp("agent")
    agent = AgentServer(str(folder / "agent.sock"), slab_bytes=32 << 20)
    yield agent
    agent.validate()
    wait_until(lambda: at_baseline(agent), timeout_s=WAIT_S, what="no lease and no filling slot")
    agent.close()


@pytest.fixture(scope="module")
def harness(model: Path, agent: AgentServer, expected: list[Reference]) -> Iterator[Harness]:
    """The engine of two ranks, after that of one: never both at once."""
    assert expected
    with running_engine(**two_ranks(model, agent)) as harness:
        yield harness


def ask(harness: Harness, ids: list[int], **kv: Any) -> tuple[Reference, dict[str, Any]]:
    """(tokens with their leads, the connector's report) of one request."""
    params = harness.params(max_tokens=OUTPUT, ignore_eos=True, logprobs=2)
    request = harness.request(ids, params)
    harness.engine.add(request, (), kv or None)
    answer = harness.run()[request.request_id]
    # The chosen token's comes first, then the best two: their samplers are in other processes.
    leads = [best - rival for _, (_, best, rival) in answer.logprobs]
    return Reference(answer.tokens, leads), dict(answer.outputs[-1].kv_transfer_params["headwater"])


def at_baseline(agent: AgentServer) -> bool:
    """Whether nothing is held: what an engine gives back travels to the agent."""
    ledger = agent.ledger(SERVED_MODEL)
    return (ledger.leased_slots, ledger.filling, ledger.quarantined) == (0, 0, 0)


def in_rank(harness: Harness, rank: int, call: str, *arguments: int) -> None:
    """Do one of the FAULTS below to one rank, in its own process."""
    harness.engine._core.collective_rpc(_do, args=(rank, call, arguments))


def _do(_worker: Any, rank: int, call: str, arguments: tuple[int, ...]) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    if get_tensor_model_parallel_rank() == rank:
        FAULTS[call](get_kv_transfer_group(), *arguments)


FAULTS: dict[str, Callable[..., None]] = {
    "fail the read after": lambda connector, skip: connector.session.faults.fail_next(skip=skip),
    "fill no slot": lambda connector: setattr(connector.session, "store", lambda: None),
    "fill slots again": lambda connector: delattr(connector.session, "store"),
}


def test_two_ranks_publish_a_block_as_a_whole_load_it_and_give_the_tokens_of_one(
    harness: Harness, agent: AgentServer, expected: list[Reference]
) -> None:
    engine = harness.engine
    assert engine.layout.ranks == RANKS
    assert agent._arenas[SERVED_MODEL].layout == engine.layout
    answer, report = ask(harness, prompt(0), handoff="to/1", publish_handoff=True)
    check_tokens(answer.tokens, expected[0])
    assert report["loaded_blocks"] == 0
    # All of them, and in the report: they were published before the outputs were made.
    assert report["published_blocks"] == (TOKENS + OUTPUT - 1) // BLOCK_SIZE
    assert agent.ledger(SERVED_MODEL).leased_slots == report["published_blocks"]

    harness.forget()
    answer, report = ask(harness, prompt(0), handoff="to/1")
    check_tokens(answer.tokens, expected[0])
    assert (report["loaded_blocks"], report["failed_blocks"]) == (BLOCKS, 0)
    assert report["computed_tokens"] == TOKENS - BLOCKS * BLOCK_SIZE + OUTPUT - 1
    wait_until(lambda: at_baseline(agent), timeout_s=WAIT_S, what="no lease and no filling slot")

    harness.forget()
    answer, report = ask(harness, prompt(1))
    check_tokens(answer.tokens, expected[1])
    assert report["loaded_blocks"] == 0


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_one_rank_cannot_read_both_compute(harness: Harness, rank: int) -> None:
    ids = prompt(10 + rank)
    expected, _ = ask(harness, ids)
    failures = harness.engine.kv_stats().load_failures_total
    harness.forget()
    in_rank(harness, rank, "fail the read after", FAILED_BLOCK)
    answer, report = ask(harness, ids)
    check_tokens(answer.tokens, expected)
    assert report["loaded_blocks"] == FAILED_BLOCK
    assert report["failed_blocks"] == BLOCKS - FAILED_BLOCK
    assert report["load_failure"] == "unavailable"
    assert report["computed_tokens"] == TOKENS - FAILED_BLOCK * BLOCK_SIZE + OUTPUT - 1
    assert harness.engine.kv_stats().load_failures_total == failures + 1
    # What was computed is right, in the engine's own cache too.
    answer, report = ask(harness, ids)
    check_tokens(answer.tokens, expected)
    assert report["loaded_blocks"] == 0


@pytest.mark.parametrize("rank", range(RANKS))
def test_blocks_that_one_rank_did_not_fill_are_nowhere_to_be_found(
    harness: Harness, agent: AgentServer, rank: int
) -> None:
    ids = prompt(20 + rank)
    names = set(agent.snapshot_events(SERVED_MODEL).hashes)
    in_rank(harness, rank, "fill no slot")
    try:
        expected, report = ask(harness, ids)
    finally:
        in_rank(harness, rank, "fill slots again")
    assert report["published_blocks"] == 0
    assert report["degraded"]
    assert set(agent.snapshot_events(SERVED_MODEL).hashes) == names
    wait_until(lambda: at_baseline(agent), timeout_s=WAIT_S, what="no lease and no filling slot")
    harness.forget()
    answer, report = ask(harness, ids)
    check_tokens(answer.tokens, expected)
    assert report["loaded_blocks"] == 0
    assert report["published_blocks"] == (TOKENS + OUTPUT - 1) // BLOCK_SIZE


def test_a_seeded_request_goes_on_from_its_tokens_so_far(
    harness: Harness, expected: list[Reference]
) -> None:
    _, _, whole = expected
    check_tokens(harness.answer(prompt(2), harness.params(**SEEDED)).tokens, whole)
    harness.forget()
    rest = harness.answer(prompt(2), harness.params(**SEEDED), whole.until(33).tokens)
    check_tokens(rest.tokens, whole.after(33))


def test_a_request_that_ends_while_the_ranks_load_leaves_nothing(
    harness: Harness, agent: AgentServer
) -> None:
    engine = harness.engine
    ask(harness, prompt(3))
    harness.forget()
    request = harness.request(prompt(3), harness.params(max_tokens=4))
    engine.add(request)
    for _ in range(1000):
        engine.step()
        if engine.status_of(request.request_id) == "waiting_for_remote_kvs":
            break
    else:
        raise AssertionError("it never loads")
    engine.abort([request.request_id])
    harness.run()
    assert engine.counts().free_blocks == engine.counts().total_blocks
    wait_until(lambda: at_baseline(agent), timeout_s=WAIT_S, what="no lease and no filling slot")
    answer, report = ask(harness, prompt(3))
    assert len(answer.tokens) == OUTPUT
    assert report["loaded_blocks"] == BLOCKS


def test_blocks_of_another_number_of_ranks_are_refused_by_name(
    harness: Harness, agent: AgentServer, model: Path
) -> None:
    assert harness.engine.layout.ranks == RANKS
    with (
        pytest.raises(RegistrationRefused) as refused,
        running_engine(
            model_path=str(model), kv_cache_bytes=16 << 20, agent_socket=agent.socket_path
        ),
    ):
        raise AssertionError("an engine of one rank took blocks of two")
    assert refused.value.differences == (f"ranks: 1 here, {RANKS} there",)


ENGINE = """
import sys
from deployments.engine.inprocess import InprocessEngine
from deployments.engine.settings import EngineSettings

if __name__ == "__main__":
    engine = InprocessEngine(
        EngineSettings(model_path=sys.argv[1], served_model="m", role="decode", dtype="float32",
                       kv_cache_bytes=16 << 20, tensor_parallel_size=2)
    )
    print("built", flush=True)
    sys.stdin.read()
"""


@pytest.mark.full
def test_a_rank_that_dies_ends_its_engine_and_ranks_do_not_outlive_theirs(
    model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    for killed in ("rank", "engine"):
        with subprocess.Popen(
            [sys.executable, str(script), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        ) as engine:
            assert engine.stdout is not None
            assert any(line == "built\n" for line in engine.stdout)
            family = psutil.Process(engine.pid).children(recursive=True)
            ranks = [one for one in family if "Worker_TP" in one.name()]
            assert len(ranks) == RANKS
            (ranks[1] if killed == "rank" else engine).kill()
            assert engine.wait(WAIT_S) == (70 if killed == "rank" else -9)
            wait_until(
                lambda ranks=ranks: not any(_lives(one) for one in ranks),
                timeout_s=WAIT_S,
                what="the ranks to end",
            )


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
