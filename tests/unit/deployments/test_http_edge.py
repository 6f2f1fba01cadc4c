import asyncio
import json

import pytest

from deployments.edge.asgi import AsgiMessage, Receive, Scope, Send
from deployments.edge.http_edge import CURRENT_TRACE, REFUSED_FIELDS, Refusal
from tests.unit.deployments.edge_world import (
    BODY_BYTES_MAX,
    CHAT,
    App,
    Events,
    ask,
    edge_round,
    scope_of,
)

# ---- the header -----------------------------------------------------------------------------


async def test_an_answer_carries_the_name_of_its_request_which_the_application_sees_too() -> None:
    app, events = App(), Events()
    edge = edge_round(app, events)
    first, second = await ask(edge, b'{"a": 1}'), await ask(edge)
    assert app.bodies == [b'{"a": 1}', b"{}"]
    assert app.traces == [first.trace_id, second.trace_id] == events.admitted == events.released
    assert first.trace_id != second.trace_id
    assert CURRENT_TRACE.get() is None


async def test_every_error_carries_the_header() -> None:
    events = Events()
    too_large = await ask(edge_round(App(), events), b"x" * (BODY_BYTES_MAX + 1))
    refused = await ask(edge_round(App(), events), b'{"vllm_xargs": {"a": 1}}')
    theirs = await ask(edge_round(App(status=422), events))
    broken = await ask(edge_round(App(fails=ValueError("bug")), events))
    busy = await ask(edge_round(App(), Events(refusal=Refusal(1.0, "Full."))))
    answers = [too_large, refused, theirs, broken, busy]
    assert [answer.status for answer in answers] == [413, 400, 422, 500, 429]
    assert len({answer.trace_id for answer in answers}) == 5


async def test_errors_are_in_the_shape_that_openai_clients_read() -> None:
    answer = await ask(edge_round(App(), Events()), b'{"kv_transfer_params": {}}')
    assert answer.error.keys() == {"message", "type", "param", "code"}
    assert answer.error["param"] == "kv_transfer_params"
    assert answer.error["code"] == "unsupported_parameter"
    assert answer.header(b"content-type") == b"application/json"
    assert answer.header(b"content-length") == str(len(answer.body)).encode()


# ---- the body's size ------------------------------------------------------------------------


async def test_a_body_of_just_the_limit_passes_and_one_byte_more_does_not() -> None:
    app, events = App(), Events()
    edge = edge_round(app, events)
    assert (await ask(edge, b"x" * BODY_BYTES_MAX)).status == 200
    answer = await ask(edge, b"x" * (BODY_BYTES_MAX + 1))
    assert answer.status == 413
    assert str(BODY_BYTES_MAX) in answer.error["message"]
    assert len(app.bodies) == len(events.admitted) == 1


async def test_a_body_in_parts_is_bounded_as_a_whole_and_not_read_beyond_that() -> None:
    reads = 0

    async def endless() -> AsgiMessage:
        nonlocal reads
        reads += 1
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    sent: list[AsgiMessage] = []

    async def send(message: AsgiMessage) -> None:
        sent.append(message)

    await edge_round(App(), Events())(scope_of(CHAT), endless, send)
    assert sent[0]["status"] == 413
    assert reads == BODY_BYTES_MAX // 100 + 1


async def test_a_body_in_parts_reaches_the_application_whole() -> None:
    app = App()
    await ask(edge_round(app, Events()), [b'{"a":', b"", b" 1}"])
    assert app.bodies == [b'{"a": 1}']


async def test_a_refused_field_may_not_hide_between_two_parts() -> None:
    parts = [b'{"kv_transfer', b'_params": {"do_remote_prefill": true}}']
    assert (await ask(edge_round(App(), Events()), parts)).status == 400


# ---- fields ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED_FIELDS)
@pytest.mark.parametrize("value", [{}, {"a": 1}, [], "", 0, False])
async def test_a_reserved_field_is_refused_whatever_it_holds(name: str, value: object) -> None:
    app, events = App(), Events()
    answer = await ask(edge_round(app, events), json.dumps({"model": "m", name: value}).encode())
    assert (answer.status, answer.error["param"]) == (400, name)
    assert not (app.bodies or events.admitted or events.released)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
async def test_no_encoding_that_json_allows_hides_a_reserved_field(encoding: str) -> None:
    body = '{"kv_transfer_params": {"do_remote_prefill": true}}'.encode(encoding)
    assert json.loads(body), "the application would read it"
    assert (await ask(edge_round(App(), Events()), body)).status == 400


@pytest.mark.parametrize(
    "body",
    [
        rb'{"kv\u005ftransfer_params": {}}',
        rb'{"\u006b\u0076_transfer_params": {}}',
        rb'{"\u006B\u0076\u005F\u0068\u0069\u006E\u0074\u0073": {}}',
        rb'{"vllm_xargs": null, "vllm\u005fxargs": {}}',
        b'{"vllm_xargs": null, "vllm_xargs": {}}',
        b' \n{"a": {"b": []},\t"kv_hints" : 1}',
    ],
)
async def test_neither_escapes_nor_repetition_hide_a_reserved_field(body: bytes) -> None:
    assert (await ask(edge_round(App(), Events()), body)).status == 400


async def test_extra_arguments_inside_sampling_parameters_are_refused() -> None:
    body = b'{"token_ids": [1], "sampling_params": {"extra_args": {"kv_transfer_params": {}}}}'
    answer = await ask(edge_round(App(), Events()), body, path="/inference/v1/generate")
    assert (answer.status, answer.error["param"]) == (400, "sampling_params.extra_args")


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "what is kv_transfer_params?"}]},
        {"messages": [{"role": "user", "content": "caf\u00e9 \u0000 kv_hints"}]},
        {"tools": [{"function": {"parameters": {"vllm_xargs": {}}}}]},
        {"metadata": {"kv_transfer_params": "x"}},
        {"kv_transfer_params": None},
        {"sampling_params": {"extra_args": None}},
        {"sampling_params": "extra_args"},
        {"extra_args": {"a": 1}},
        ["kv_transfer_params"],
    ],
)
async def test_these_words_elsewhere_are_the_clients_own_business(body: object) -> None:
    app = App()
    sent = json.dumps(body).encode()
    assert (await ask(edge_round(app, Events()), sent)).status == 200
    assert app.bodies == [sent]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"kv_transfer_params": ', b"\xff\x00", b"[" * 900, b'{"kv_hints"\xff: 1}'],
)
async def test_malformed_json_is_left_for_the_application_to_answer(body: bytes) -> None:
    app = App(status=400)
    assert (await ask(edge_round(app, Events()), body)).status == 400
    assert app.bodies == [body]


async def test_a_body_in_another_encoding_is_refused_and_no_encoding_is_none() -> None:
    app = App()
    scope = scope_of(CHAT)
    scope["headers"] += [(b"content-encoding", b"gzip")]
    answer = await ask(edge_round(app, Events()), scope=scope)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    scope["headers"][-1] = (b"content-encoding", b"Identity")
    assert (await ask(edge_round(app, Events()), scope=scope)).status == 200


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_text_that_no_encoding_can_write_is_refused_where_it_stands(path: str) -> None:
    app, events = App(), Events()
    body = rb'{"messages": [{"role": "user", "content": "a\ud83d"}]}'
    answer = await ask(edge_round(app, events), body, path=path)
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert answer.error["param"] == "messages[0].content"
    assert not (app.bodies or events.admitted)


@pytest.mark.parametrize(
    ("name", "status"), [("x" * 128, 200), ("x" * 129, 400), (["x"] * 100, 200)]
)
async def test_the_length_of_a_request_id_in_the_body_is_bounded(name: object, status: int) -> None:
    body = json.dumps({"request_id": name}).encode()
    for sent in (body, body.replace(b"_", rb"\u005f")):
        answer = await ask(edge_round(App(), Events()), sent)
        assert answer.status == status
        assert status == 200 or answer.error["param"] == "request_id"


async def test_refusals_under_messages_are_in_anthropics_shape() -> None:
    path = "/v1/messages"
    busy = Events(refusal=Refusal(3.0, "Full."))
    answers = [
        await ask(edge_round(App(), busy), path=path),
        await ask(edge_round(App(), Events()), b"x" * 2 * BODY_BYTES_MAX, path=path),
        await ask(edge_round(App(), Events()), b'{"kv_hints": 1}', path=path),
        await ask(edge_round(App(fails=ValueError("bug")), Events()), path=path),
    ]
    assert [(answer.status, answer.error["type"]) for answer in answers] == [
        (429, "rate_limit_error"),
        (413, "request_too_large"),
        (400, "invalid_request_error"),
        (500, "api_error"),
    ]
    assert {json.loads(answer.body)["type"] for answer in answers} == {"error"}
    assert answers[0].header(b"retry-after") == b"3"


# ---- admission ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after_s", "header"), [(0.0, b"1"), (0.2, b"1"), (7.1, b"8"), (9.0, b"9")]
)
async def test_a_refusal_says_when_to_come_back_and_never_too_soon(
    after_s: float, header: bytes
) -> None:
    app, events = App(), Events(refusal=Refusal(after_s, "All workers are busy."))
    answer = await ask(edge_round(app, events))
    assert answer.status == 429
    assert answer.header(b"retry-after") == header
    assert answer.error["type"] == "rate_limit_error"
    assert answer.error["code"] == "overloaded"
    assert "All workers are busy." in answer.error["message"]
    assert not (app.bodies or events.released)


async def test_a_place_is_given_back_once_when_the_application_fails() -> None:
    events = Events()
    answer = await ask(edge_round(App(fails=ValueError("bug")), events))
    assert answer.status == 500
    assert "bug" not in answer.error["message"]
    assert events.released == events.admitted == [answer.trace_id]


async def test_a_place_is_given_back_once_when_the_client_goes_during_the_answer() -> None:
    events = Events()
    with pytest.raises(OSError, match="client gone"):
        await ask(edge_round(App(), events), send_fails=True)
    assert len(events.released) == len(events.admitted) == 1


async def test_a_place_is_given_back_once_when_the_request_is_cancelled() -> None:
    events, started = Events(), asyncio.Event()

    async def slow(_scope: Scope, _receive: Receive, _send: Send) -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(ask(edge_round(slow, events)))
    await started.wait()
    assert events.released == []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events.released == events.admitted
    assert len(events.released) == 1


async def test_a_client_that_goes_while_its_body_is_read_reserves_nothing_and_gets_nothing() -> (
    None
):
    app, events = App(), Events()
    answer = await ask(edge_round(app, events), [b'{"a":', b" 1}"], leaves_after=1)
    assert answer.messages == []
    assert not (app.scopes or events.admitted or events.released)


async def test_the_application_hears_of_a_disconnect_after_the_body() -> None:
    app = App()
    await ask(edge_round(app, Events()))
    assert app.after_body == ["http.disconnect"]


# ---- X-Request-Id ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "is_kept"),
    [
        (b"abc-1.2:3_4", True),
        (b"x" * 128, True),
        (b"x" * 129, False),
        (b"", False),
        (b"a\nb", False),
        (b"abc\n", False),
        ("é".encode(), False),
        (b'"}', False),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_an_unsafe_request_id_is_dropped_on_every_path(
    path: str,
    value: bytes,
    is_kept: bool,  # noqa: FBT001
) -> None:
    app = App()
    scope = scope_of(path)
    scope["headers"] += [(b"x-request-id", value), (b"accept", b"*/*")]
    await ask(edge_round(app, Events()), scope=scope)
    names = [name for name, _ in app.scopes[0]["headers"]]
    assert (b"x-request-id" in names) == is_kept
    assert names[0] == b"content-type"
    assert names[-1] == b"accept"


# ---- which requests -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope",
    [
        scope_of("/tokenize"),
        scope_of("/v1/chat/completions/render"),
        scope_of("/v1/models", method="GET"),
        scope_of(CHAT, method="OPTIONS"),
    ],
)
async def test_requests_that_generate_nothing_pass_untouched(scope: Scope) -> None:
    app, events = App(), Events(refusal=Refusal(1.0, "Full."))
    body = [b'{"kv_transfer_params": {}}', b"x" * 20]
    answer = await ask(edge_round(app, events), body, scope=scope)
    assert answer.status == 200
    assert answer.messages[0]["headers"] == [(b"content-type", b"application/json")]
    assert app.bodies == [b"".join(body)]
    assert app.traces == [None]


async def test_the_size_of_a_body_is_bounded_where_nothing_is_generated() -> None:
    app, events = App(), Events()
    answer = await ask(
        edge_round(app, events), [b"x" * 2 * BODY_BYTES_MAX], scope=scope_of("/tokenize")
    )
    assert answer.status == 413
    assert app.bodies == []


async def test_a_lifespan_scope_passes_untouched() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(scope)

    async def never(_: object = None) -> AsgiMessage:
        raise AssertionError

    await edge_round(app, Events())({"type": "lifespan"}, never, never)  # type: ignore[arg-type]
    assert seen == [{"type": "lifespan"}]


@pytest.mark.parametrize("end", ["", "/", "//"])
async def test_a_slash_at_the_end_makes_no_difference_to_the_checks(end: str) -> None:
    answer = await ask(edge_round(App(), Events()), b'{"kv_hints": 1}', path=CHAT + end)
    assert answer.status == 400


# ---- every request is counted once ----------------------------------------------------------


async def test_the_end_of_each_request_is_told_once_with_the_status_that_it_was_given() -> None:
    events = Events()
    edge = edge_round(App(), events)
    answered = await ask(edge)
    too_large = await ask(edge, b"x" * (BODY_BYTES_MAX + 1))
    reserved = await ask(edge, b'{"kv_transfer_params": 1}')
    failed = await ask(edge_round(App(fails=ValueError("bug")), events))
    events.refusal = Refusal(1.0, "Busy.")
    busy = await ask(edge)
    answers = [answered, too_large, reserved, failed, busy]
    assert [answer.status for answer in answers] == [200, 413, 400, 500, 429]
    assert events.ends == [(answer.trace_id, answer.status) for answer in answers]


async def test_a_client_that_left_unanswered_has_no_status() -> None:
    events = Events()
    await ask(edge_round(App(), events), [b'{"a":', b" 1}"], leaves_after=1)
    assert [status for _, status in events.ends] == [None]


async def test_requests_that_ask_for_no_tokens_are_not_counted() -> None:
    events = Events()
    await ask(edge_round(App(), events), path="/tokenize")
    await ask(edge_round(App(), events), path="/tokenize", body=b"x" * (BODY_BYTES_MAX + 1))
    assert events.ends == []


async def test_what_would_run_on_after_its_request_is_refused() -> None:
    for store, status in (("false", 400), ("0", 400), (True, 200), (None, 200)):
        body = json.dumps({"background": True, "store": store}).encode()
        answer = await ask(edge_round(App(), Events()), body, path="/v1/responses")
        assert answer.status == status
