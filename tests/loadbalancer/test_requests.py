"""Requests through a balancer: who answers, under which names, and what does not get in."""

from __future__ import annotations

import asyncio
import json
import re

import aiohttp
import pytest

from tests.loadbalancer.conftest import CHAT, PATIENCE_S, World, having
from tests.loadbalancer.stub_ingress import Asked
from tests.waiting import wait_until_async


async def answered(world: World, **headers: str) -> Asked:
    """A request with these headers, as its ingress saw it; it is answered."""
    stream, asked = await world.stream(parts=1, headers=headers)
    assert stream.response.headers["x-headwater-request"] == asked.name
    await stream.rest()
    return asked


# ---- who answers ----------------------------------------------------------------------------


async def test_an_ingress_that_is_not_ready_gets_no_new_work_and_ends_what_it_has(
    world: World,
) -> None:
    stream, asked = await world.stream(parts=20)
    beside, asked_beside = await world.stream()  # at the other: neither has less to do
    here, other = world.of(asked)
    assert asked_beside.ingress == other.name
    here.is_ready = False
    await world.noticed(here)
    for _ in range(6):
        assert (await served(world)).ingress == other.name
    if world.front.kind == "haproxy":
        assert len(here.seen) == 1, "HAProxy asks /ready, and sends nothing there"
    if world.front.kind == "nginx":
        assert len(here.seen) > 1, "or nothing was asked twice here"
    asked.send(20)
    asked_beside.send(3)
    assert (await stream.rest(), await beside.rest()) == (20, 3)


async def served(world: World) -> Asked:
    """A request that was answered whole, by whichever ingress was left to."""
    opening = asyncio.create_task(world.post(parts=1))
    while True:
        asked = await world.next()
        if world.of(asked)[0].is_ready:
            break
    asked.send()
    response = await opening
    assert response.status == 200
    await response.read()
    return asked


async def test_where_no_ingress_is_ready_their_own_refusal_reaches_the_client(
    world: World,
) -> None:
    for ingress in world.ingresses:
        ingress.is_ready = False
    for ingress in world.ingresses:
        await world.noticed(ingress)
    response = await world.post()
    assert response.status == 503
    assert response.headers["retry-after"] == "7"
    assert (await response.json())["error"]["code"] == "overloaded"


async def test_where_no_ingress_lives_the_balancer_says_when_to_come_again(world: World) -> None:
    for ingress in world.ingresses:
        await ingress.kill()
    response = await world.post()
    assert response.status == 503
    assert response.headers["retry-after"] == "2"
    assert response.content_type == "application/json"
    assert (await response.json())["error"]["code"] == "overloaded"


async def test_a_refusal_for_overload_is_passed_on_and_not_tried_elsewhere(world: World) -> None:
    for ingress in world.ingresses:
        ingress.refuses = 429
    response = await world.post()
    assert (response.status, response.headers["retry-after"]) == (429, "7")
    assert sum(len(ingress.seen) for ingress in world.ingresses) == 1


# ---- what does not get in -------------------------------------------------------------------


async def test_a_body_beyond_the_bound_is_refused_and_reaches_no_ingress(world: World) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.front.port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 65537\r\n\r\n"
    writer.write(head.encode() + b"{" * 1000)
    async with asyncio.timeout(10):
        status = await reader.readline()
        headers = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", headers)
        assert length is not None
        body = json.loads(await reader.readexactly(int(length[1])))
    writer.close()
    assert b" 413 " in status
    assert body["error"]["code"] == "request_too_large"
    assert [ingress.seen for ingress in world.ingresses] == [[], []]


async def test_a_body_at_the_bound_gets_in(world: World) -> None:
    padding = 65_536 - len(json.dumps({"parts": 1, "text": ""}))
    stream, asked = await world.stream(parts=1, text="x" * padding)
    assert len(asked.body) == 65_536
    assert await stream.rest() == 1


@having(BODY_BYTES_MAX="4194304")
async def test_a_body_without_a_length_is_bounded_too(world: World) -> None:
    async def parts() -> object:
        for _ in range(5 << 4):
            yield b"x" * 65_536  # beyond the ingress's bound, and then the balancer's

    try:
        response = await world.client.post(world.front.url + CHAT, data=parts())
    except aiohttp.ClientConnectionError:  # refused in mid-body, and closed before it was read
        assert world.front.process.returncode is None
    else:
        assert response.status == 413
    assert world.asked.empty(), "no ingress had a whole body"
    if world.front.kind == "nginx":  # it has a body whole before an ingress sees any of it
        assert [one.seen for one in world.ingresses] == [[], []]


@having(TRUSTED_PROXIES="127.0.0.0/8")
async def test_who_comes_by_a_trusted_proxy_is_no_operator(world: World) -> None:
    assert (await world.client.get(world.front.url + "/headwater/status")).status == 404
    assert (await world.client.get(world.front.url + "/ready")).status == 200


@having(OPERATOR_NETS="192.0.2.7/32")
@pytest.mark.parametrize(
    "path", ["/headwater/status", "/%68eadwater/status", "/headwater%2Fstatus"]
)
async def test_operators_routes_are_closed_to_everybody_else(world: World, path: str) -> None:
    from yarl import URL

    response = await world.client.get(URL(world.front.url + path, encoded=True))
    assert response.status == 404
    assert (await world.client.get(world.front.url + "/ready")).status == 200


async def test_operators_routes_are_open_to_operators(world: World) -> None:
    assert (await world.client.get(world.front.url + "/headwater/status")).status == 200


# ---- under which names ----------------------------------------------------------------------


async def test_the_client_s_name_for_its_request_is_kept(world: World) -> None:
    assert (await answered(world, **{"X-Request-Id": "mine:1.a_b-c"})).headers[
        "x-request-id"
    ] == "mine:1.a_b-c"


@pytest.mark.parametrize("sent", [None, "with space", "x" * 129])
async def test_a_request_without_a_usable_name_gets_one(world: World, sent: str | None) -> None:
    given = {"X-Request-Id": sent} if sent else {}
    names = {(await answered(world, **given)).headers["x-request-id"] for _ in range(2)}
    assert len(names) == 2
    assert all(re.fullmatch(r"[0-9a-f-]{32,36}", name) for name in names)


async def test_the_client_s_address_is_the_one_that_connected_whatever_it_says(
    world: World,
) -> None:
    asked = await answered(
        world,
        **{"X-Forwarded-For": "6.6.6.6", "X-Forwarded-Proto": "https", "Forwarded": "for=6.6.6.6"},
    )
    assert asked.headers["x-forwarded-for"] == "127.0.0.1"
    assert asked.headers.get("x-forwarded-proto", "http") == "http"
    assert "forwarded" not in asked.headers


@having(TRUSTED_PROXIES="127.0.0.1/32")
async def test_a_trusted_proxy_s_word_on_the_client_s_address_is_kept(world: World) -> None:
    asked = await answered(
        world, **{"X-Forwarded-For": "203.0.113.5", "X-Forwarded-Proto": "https"}
    )
    hops = [hop.strip() for hop in asked.headers["x-forwarded-for"].split(",")]
    assert hops == ["203.0.113.5", "127.0.0.1"]
    assert asked.headers["x-forwarded-proto"] == "https"


async def test_the_log_joins_the_balancer_s_names_with_the_ingress_s(world: World) -> None:
    asked = await answered(world, **{"X-Request-Id": "joined-7"})

    async def logged() -> list[str]:
        lines = world.front.log.read_text().splitlines(keepends=True)
        return [line.rstrip("\n") for line in lines if asked.name in line and line.endswith("\n")]

    (line,) = await wait_until_async(logged, timeout_s=PATIENCE_S, what="its line in the log")
    assert line.endswith(asked.name)
    if world.front.kind == "nginx":
        assert "joined-7" in line
