"""A turn against stub servers, and how requests are dealt out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from loadtests.compare import measuring
from loadtests.compare.loads import LOADS, Load
from loadtests.compare.measuring import Conditions, WarmUpFailed, measured
from loadtests.compare.schedule import Turn
from loadtests.compare.setups import Running
from loadtests.load.records import Outcome, Request, Run
from loadtests.load.stub_server import MODEL, Fault, Script, StubServer, serving
from loadtests.load.token_prompts import TokenIds, Vocabulary


@dataclass
class Stubs:
    """A set-up of servers that run already."""

    urls: tuple[str, ...]
    label: str = "b"
    title: str = "Stubs"
    how: str = "stub servers"
    mended: Sequence[str] = ("its delays",)

    @contextmanager
    def start(self, folder: Path) -> Iterator[Running]:
        yield Running(self.urls, MODEL, facts={"folder": folder.name})


def _four(_: int, __: float, words: Vocabulary) -> list[Request]:
    return [Request(n, words.prompt((2000 + n,)), 3, due_s=0.01 * n) for n in range(4)]


FOUR = replace(LOADS["mixed"], warmup_s=0.0, requests=_four)


def conditions(*loads: Load) -> Conditions:
    return Conditions(loads, 1, 0.2, TokenIds(1000, 9000), {"cores": 2})


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "PAUSE_S", 0.0)


async def turn(
    scripts: Sequence[Script], *loads: Load
) -> tuple[list[tuple[Load, Run]], list[StubServer], list[str]]:
    said: list[str] = []
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serving(script)) for script in scripts]
        set_up = Stubs(tuple(url for _, url in served))
        with set_up.start(Path("x")) as running:
            found = await measured(
                set_up, Turn(3, "b"), running, conditions(*loads), {"date": "today"}, said.append
            )
    return found, [server for server, _ in served], said


async def test_requests_go_to_two_servers_in_turn() -> None:
    found, servers, _ = await turn([Script(), Script()], FOUR)
    warm = [len(server.log) - 2 for server in servers]
    assert warm == [6, 6]
    sent = [[served.body["prompt"][0] for served in server.log[6:]] for server in servers]
    assert sorted(sent) == [[2000, 2002], [2001, 2003]]
    ((load, run),) = found
    assert load is FOUR
    assert [sample.outcome for sample in run.samples] == [Outcome.OK] * 4


async def test_a_run_tells_its_set_up_and_what_it_was_measured_under() -> None:
    found, _, said = await turn([Script()], FOUR)
    ((_, run),) = found
    assert run.label == "Stubs"
    assert run.facts["set_up"] == "b" and run.facts["round"] == 3
    assert run.facts["mended"] == ["its delays"] and run.facts["date"] == "today"
    assert run.conditions["workload"] == "mixed" and run.conditions["seed"] == 1
    assert run.conditions["cores"] == 2 and run.conditions["window_s"] == 0.2
    assert run.window_s == (0.0, pytest.approx(0.2))
    assert said == ["03-b: mixed: 4 of 4 requests ended well"]


async def test_servers_whose_processes_are_not_known_have_no_cpu() -> None:
    found, _, _ = await turn([Script()], FOUR)
    assert [run.cpu for _, run in found] == [()]


async def test_each_load_is_a_run() -> None:
    other = replace(FOUR, name="shared_prefix")
    found, servers, _ = await turn([Script()], FOUR, other)
    assert [run.conditions["workload"] for _, run in found] == ["mixed", "shared_prefix"]
    assert len(servers[0].log) == 12 + 8


async def test_a_set_up_that_fails_its_warm_up_is_not_measured() -> None:
    with pytest.raises(WarmUpFailed, match="12 of 12 requests of the warm-up failed, the first"):
        await turn([Script(faults=(Fault.BUSY,))], FOUR)


async def test_failures_under_load_are_kept_in_the_run() -> None:
    faults = (*(Fault.NONE,) * 12, Fault.NONE, Fault.CUT, Fault.NONE, Fault.NONE)
    found, _, said = await turn([Script(faults=faults)], FOUR)
    ((_, run),) = found
    assert sorted(str(s.outcome) for s in run.samples) == ["cut", "ok", "ok", "ok"]
    assert said == ["03-b: mixed: 3 of 4 requests ended well"]
