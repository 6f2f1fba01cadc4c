"""One request to a real server whose every chunk and failure is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from loadtests.load import client
from loadtests.load.client import Target
from loadtests.load.records import Outcome, Request, Sample
from loadtests.load.stub_server import MODEL, Fault, Script, StubServer, serving

IDS = Request(3, (11, 12, 13), 6, group="turn 1")
TEXT = Request(4, "one two", 6)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def ask(url: str, request: Request = IDS, **fields: Any) -> Sample:
    target = Target(url, MODEL, **fields)
    async with client.session_for(target) as session:
        return await client.send(session, target, request, time.monotonic, due_s=1.0)


async def asked(script: Script, request: Request = IDS, **fields: Any) -> tuple[Sample, StubServer]:
    async with serving(script) as (server, url):
        return await ask(url, request, **fields), server


async def answer_by(handler: Handler, request: Request = IDS, **fields: Any) -> Sample:
    application = web.Application()
    application.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(application, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return await ask(f"http://127.0.0.1:{runner.addresses[0][1]}", request, **fields)
    finally:
        await runner.cleanup()


def stream_of(*payloads: str, kind: str = "text/event-stream") -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": kind})
        await reply.prepare(request)
        for payload in payloads:
            await reply.write(payload.encode())
        return reply

    return handler


def event(text: str = "", ids: list[int] | None = None, **fields: Any) -> str:
    choice: dict[str, Any] = {"index": 0, "text": text, **fields}
    if ids is not None:
        choice["token_ids"] = ids
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def usage(completion: int) -> str:
    counts = {"prompt_tokens": 3, "completion_tokens": completion}
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n"


DONE = "data: [DONE]\n\n"


async def test_a_good_answer_is_a_sample_with_a_time_for_each_chunk() -> None:
    begun_s = time.monotonic()
    sample, server = await asked(Script(cached_tokens=2))
    (served,) = server.log
    assert sample.outcome is Outcome.OK
    assert [chunk.tokens for chunk in sample.chunks] == [1] * 6
    assert (sample.input_tokens, sample.output_tokens, sample.cached_tokens) == (3, 6, 2)
    assert (sample.index, sample.group, sample.due_s) == (3, "turn 1", 1.0)
    assert (sample.request_id, sample.status, sample.detail) == ("stub-0", 200, "")
    # Same machine, same clock: read after it was written, in the order of things.
    read_s = [chunk.at_s for chunk in sample.chunks]
    assert all(read >= wrote for read, wrote in zip(read_s, served.wrote_s, strict=True))
    assert begun_s < sample.sent_s <= served.arrived_s <= read_s[0]
    assert read_s == sorted(read_s)
    assert read_s[-1] <= sample.ended_s


async def test_exact_tokens_are_asked_for_as_vllm_understands_it() -> None:
    _, server = await asked(Script())
    assert server.log[0].path == "/v1/completions"
    assert server.log[0].body == {
        "model": MODEL,
        "prompt": [11, 12, 13],
        "max_tokens": 6,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def test_a_server_that_knows_no_extension_is_sent_none() -> None:
    sample, server = await asked(Script(), TEXT, extensions=False, exact=False)
    assert server.log[0].body.keys().isdisjoint({"ignore_eos", "return_token_ids"})
    assert sample.outcome is Outcome.OK
    assert sum(chunk.tokens for chunk in sample.chunks) == 6


async def test_chat_is_asked_with_a_message_and_read_from_its_deltas() -> None:
    sample, server = await asked(Script(ids=False), TEXT, api="chat")
    assert server.log[0].path == "/v1/chat/completions"
    assert server.log[0].body["messages"] == [{"role": "user", "content": "one two"}]
    assert sample.outcome is Outcome.OK
    assert len(sample.chunks) == 6


def test_chat_of_token_ids_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="chat takes text"):
        Target("http://host", MODEL, api="chat").check([TEXT, IDS])


@pytest.mark.parametrize(
    "delta",
    [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}],
)
async def test_reasoning_and_tool_calls_are_content_too(delta: dict[str, Any]) -> None:
    choice = {"index": 0, "delta": delta}
    line = f"data: {json.dumps({'choices': [choice]})}\n\n"
    sample = await answer_by(stream_of(line, DONE), exact=False)
    assert (sample.outcome, len(sample.chunks)) == (Outcome.OK, 1)


async def test_role_and_empty_chunks_are_no_tokens() -> None:
    role = 'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'
    null = 'data: {"choices": [{"index": 0, "delta": {"content": null}}]}\n\n'
    sample = await answer_by(
        stream_of(role, null, event(""), event("a"), event("", finish_reason="length"), DONE),
        exact=False,
    )
    assert (sample.outcome, len(sample.chunks)) == (Outcome.OK, 1)


async def test_a_chunk_carries_as_many_tokens_as_it_has_ids_whatever_its_text() -> None:
    sample = await answer_by(
        stream_of(event("", [1]), event("ab", [2, 3, 4]), event("c", [5, 6]), usage(6), DONE)
    )
    assert sample.outcome is Outcome.OK
    assert [chunk.tokens for chunk in sample.chunks] == [1, 3, 2]


async def test_text_that_was_held_back_is_no_token_where_ids_are_told() -> None:
    sample = await answer_by(stream_of(event("a", [1, 2]), event("rest"), DONE), exact=False)
    assert [chunk.tokens for chunk in sample.chunks] == [2]


async def test_without_ids_usage_says_whether_the_length_is_right() -> None:
    # Six tokens in two chunks, from a server that does not tell ids.
    sample = await answer_by(stream_of(event("abc"), event("def"), usage(6), DONE))
    assert (sample.outcome, sample.output_tokens) == (Outcome.OK, 6)
    assert [chunk.tokens for chunk in sample.chunks] == [1, 1]


async def test_events_are_read_whatever_their_borders_on_the_wire() -> None:
    whole = (event("ä", [1]) + event("b", [2]) + usage(2) + DONE).replace("data: ", "data:")
    raw = whole.replace("\n", "\r\n").encode()

    async def handler(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)
        for at in range(0, len(raw), 7):
            await reply.write(raw[at : at + 7])
        return reply

    sample = await answer_by(handler, Request(0, "x", 2))
    assert sample.outcome is Outcome.OK
    assert [chunk.tokens for chunk in sample.chunks] == [1, 1]


async def test_an_event_longer_than_a_line_of_aiohttp_is_read() -> None:
    long = event("a", [1], prompt_token_ids=[123_456] * 100_000)
    sample = await answer_by(stream_of(": ping\n\n", long, DONE), Request(0, "x", 1))
    assert sample.outcome is Outcome.OK


@pytest.mark.parametrize(
    ("fault", "outcome", "detail"),
    [
        (Fault.ERROR_EVENT, Outcome.ERROR_EVENT, "the stub was told to fail"),
        (Fault.ERROR_BODY, Outcome.ERROR_EVENT, "the stub was told to fail"),
        (Fault.BUSY, Outcome.REFUSED, "429 the stub was told to fail"),
        (Fault.CUT, Outcome.CUT, "payload"),
        (Fault.SHORT, Outcome.WRONG_LENGTH, "5 tokens streamed, 6 asked for"),
        (Fault.NO_STREAM, Outcome.MALFORMED, "no stream but application/json"),
    ],
)
async def test_each_failure_is_told_apart(fault: Fault, outcome: Outcome, detail: str) -> None:
    sample, _ = await asked(Script(faults=(fault,)))
    assert sample.outcome is outcome
    assert detail in sample.detail


@pytest.mark.parametrize(
    ("payloads", "outcome"),
    [
        ((event("a"), 'data: {"error": {"message": "no"}}\n\n', DONE), Outcome.ERROR_EVENT),
        ((event("a"), 'event: error\ndata: {"message": "no"}\n\n'), Outcome.ERROR_EVENT),
        ((event("a"), event("", finish_reason="abort"), DONE), Outcome.ERROR_EVENT),
        ((event("a"),), Outcome.CUT),
        ((event("a"), "data: {"), Outcome.CUT),
        ((event("a"), "data: {\n\n", DONE), Outcome.MALFORMED),
        ((event("a"), 'data: {"choices": 7}\n\n', DONE), Outcome.MALFORMED),
        ((event("a"), 'data: "\xff"\n\n', DONE), Outcome.MALFORMED),
        ((event(""), DONE), Outcome.WRONG_LENGTH),
        ((DONE,), Outcome.WRONG_LENGTH),
    ],
)
async def test_a_stream_that_goes_wrong_is_no_success(
    payloads: tuple[str, ...], outcome: Outcome
) -> None:
    sample = await answer_by(stream_of(*payloads), exact=False)
    assert sample.outcome is outcome
    assert sample.detail


@pytest.mark.parametrize("told", [5, 7])
async def test_usage_that_tells_another_length_is_wrong_even_if_the_stream_is_right(
    told: int,
) -> None:
    streamed = [event("a", [n]) for n in range(6)]
    sample = await answer_by(stream_of(*streamed, usage(told), DONE))
    assert sample.outcome is Outcome.WRONG_LENGTH
    assert f"{told} tokens in usage" in sample.detail


async def test_any_length_is_right_where_exact_tokens_were_not_asked_for() -> None:
    sample, server = await asked(Script(faults=(Fault.SHORT,)), exact=False)
    assert server.log[0].body["ignore_eos"] is False
    assert (sample.outcome, sample.output_tokens) == (Outcome.OK, 5)


async def test_an_answer_without_an_end_is_given_up() -> None:
    sample, _ = await asked(Script(faults=(Fault.STALL,)), timeout_s=0.5)
    assert sample.outcome is Outcome.TIMED_OUT
    assert sample.detail == "no end within 0.5 s"


async def test_nobody_there_is_unreachable() -> None:
    with socket.socket() as held:  # bound and not listening: refused, and nobody takes it
        held.bind(("127.0.0.1", 0))
        sample = await ask(f"http://127.0.0.1:{held.getsockname()[1]}")
    assert sample.outcome is Outcome.UNREACHABLE
    assert sample.detail


async def test_a_connection_that_nobody_takes_is_unreachable_not_timed_out() -> None:
    with contextlib.ExitStack() as held:
        full = held.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # more than are kept waiting: the next one gets no answer
            waiting = held.enter_context(socket.socket())
            waiting.settimeout(0)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        sample = await ask(url, connect_timeout_s=0.2, timeout_s=60.0)
    assert sample.outcome is Outcome.UNREACHABLE
    assert sample.ended_s - sample.sent_s < 60


async def test_a_connection_that_ends_before_the_answer_is_cut() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        sample = await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert sample.outcome is Outcome.CUT


async def test_an_answer_that_is_not_http_is_malformed() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        sample = await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert sample.outcome is Outcome.MALFORMED


async def test_a_refusal_without_words_of_the_api_is_told_in_its_own() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=502, text="<html>\nbad  gateway</html>")

    sample = await answer_by(handler)
    assert (sample.outcome, sample.status) == (Outcome.REFUSED, 502)
    assert sample.detail == "502 <html> bad gateway</html>"


async def test_the_key_goes_into_the_header_and_into_no_text() -> None:
    async with serving(Script()) as (server, url):
        sample = await ask(url, api_key="s3cret")
    assert server.log[0].headers["authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(sample)
    assert "s3cret" not in repr(Target("http://host", MODEL, api_key="s3cret"))


async def test_fields_of_the_users_own_win() -> None:
    _, server = await asked(Script(), extra={"temperature": 0.5, "cache_salt": "x"})
    assert server.log[0].body["temperature"] == 0.5
    assert server.log[0].body["cache_salt"] == "x"


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_a_url_is_taken_with_and_without_its_version(end: str) -> None:
    async with serving(Script()) as (_, url):
        assert (await ask(url + end)).outcome is Outcome.OK


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no URL of a server"):
        Target(url, MODEL)
