"""x-request-id on every answer: the client's own where it is valid, else a drawn one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deployments.edge.answer_names import NAME_HEADER, NamedAnswers
from deployments.edge.asgi import AsgiApp, Scope
from tests.unit.deployments.edge_world import App, Events, Refusal, ask, edge_round, scope_of
from tests.unit.deployments.key_world import gated

DRAWN = re.compile(rb"[0-9a-f]{32}")


def named(*names: bytes, method: str = "POST") -> Scope:
    headers = [(NAME_HEADER, name) for name in names]
    return {**scope_of("/v1/completions", method=method), "headers": headers}


APPS = {
    "answer": edge_round(App(), Events()),
    "error of vLLM's": edge_round(App(400), Events()),
    "error of the edge": edge_round(App(), Events(refusal=Refusal(1.0, "Busy."))),
    "failure": edge_round(App(fails=ValueError("bug")), Events()),
}


async def told(app: AsgiApp, scope: Scope) -> tuple[bytes | None, bytes | None]:
    got = await ask(NamedAnswers(app), scope=scope)  # type: ignore[arg-type]
    return got.header(NAME_HEADER), got.header(b"x-headwater-request")


@pytest.mark.parametrize("kind", APPS)
@pytest.mark.parametrize("name", [b"a", b"my.request:1_2-3", b"x" * 128])
async def test_valid_name_of_the_client_is_kept(kind: str, name: bytes) -> None:
    mine, traced = await told(APPS[kind], named(name))
    assert mine == name
    assert traced is not None
    assert traced != name


@pytest.mark.parametrize("kind", APPS)
@pytest.mark.parametrize(
    "names", [(), (b"",), (b"a b",), (b"x" * 129,), (b"\xe9",), (b"a\t",), (b"a", b"b")]
)
async def test_other_names_are_drawn(kind: str, names: tuple[bytes, ...]) -> None:
    drawn, traced = await told(APPS[kind], named(*names))
    assert drawn is not None
    assert DRAWN.fullmatch(drawn)
    assert traced == drawn


async def test_names_of_two_answers_differ() -> None:
    first, second = [await told(APPS["answer"], named()) for _ in range(2)]
    assert first != second


async def test_answer_without_a_key_is_named(tmp_path: Path) -> None:
    gate = gated(tmp_path, app=APPS["answer"]).gate
    assert await told(gate, named(b"mine", method="GET")) == (b"mine", None)
