"""Ways in which servers of this API have failed their clients, each as a test of what holds here.

Ids chosen by clients, stop strings over several tokens, usage in streams, the edge of the context,
empty prompts, content in parts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.client import (
    LEADS,
    TIMEOUT_S,
    Streamed,
    body_of,
    complete,
    raw_stream,
    reference_of,
    stream,
)
from tests.e2e.conftest import MODEL, Cluster, Together
from tests.e2e.corpus import CONTEXT, prompt
from tests.e2e.quiet import steps
from tests.equality import check_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LONG = 811  # a prompt that the prefill worker computes and the decode worker goes on with


def roles(cluster: Cluster, trace: str) -> list[str]:
    return [attempt["role"] for attempt in cluster.record(trace)["attempts"]]


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


# ---- ids ------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("by_header", [False, True])
def test_two_streams_of_one_id_both_have_their_own_text(
    cluster: Cluster,
    by_header: bool,  # noqa: FBT001
) -> None:
    pids = [w["pid"] for w in cluster.status()["workers"]]
    name = f"same-id-{by_header}"
    mine, theirs = prompt(40, 7001), prompt(50, 7002)
    params: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    if not by_header:
        params["request_id"] = name
    whole, _ = complete(cluster, mine, max_tokens=200, ignore_eos=True, **LEADS)
    (expected,) = whole["choices"]

    begun, progress = threading.Event(), [0]

    def note(so_far: Streamed) -> None:
        progress[0] = len(so_far.token_ids)
        if so_far.token_ids:
            begun.set()

    def finished() -> Streamed:
        if by_header:
            cluster.http.headers["x-request-id"] = name
        try:
            return stream(cluster, body_of(mine, **params), on_tokens=note)
        finally:
            cluster.http.headers.pop("x-request-id", None)

    def cancelled() -> int:
        assert begun.wait(TIMEOUT_S)
        header = name if by_header else "another"
        with raw_stream(cluster, body_of(theirs, **params), header) as other:
            other.read_events(10)
            other.reset()
        return progress[0]

    got, others_end = Together([finished, cancelled]).results()
    assert 0 < others_end < 200  # both were there at once
    assert got.errors == []
    if check_tokens(got.token_ids, reference_of(expected)):
        assert got.text == expected["text"]
    assert got.finish_reason == "length"
    assert got.done
    for seed in range(5):
        body, _ = complete(cluster, prompt(30, 7010 + seed), max_tokens=3, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == 3
    assert [w["pid"] for w in cluster.status()["workers"]] == pids
    assert min(numbers(cluster.status())) >= 0


# ---- stop strings ---------------------------------------------------------------------------


@pytest.mark.parametrize("sentences", [2, 70])
def test_no_piece_of_a_stop_string_over_four_tokens_reaches_the_client(
    cluster: Cluster, sentences: int
) -> None:
    told = "The keeper of the lighthouse wrote into his diary what he saw. " * sentences
    params: dict[str, Any] = {"prompt": told, "max_tokens": 24, "ignore_eos": True}
    params["skip_special_tokens"] = False  # so that the text is the tokens' own
    body, trace = complete(cluster, [], **params, logprobs=0)
    (choice,) = body["choices"]
    tokens = choice["logprobs"]["tokens"]
    assert "".join(tokens) == choice["text"]
    # It begins inside one token and ends inside the third after it.
    first = next(i for i in range(4, 21) if len(tokens[i]) > 1 and len(tokens[i + 3]) > 1)
    begin = len("".join(tokens[:first])) + 1
    end = len("".join(tokens[: first + 3])) + 1
    stop = choice["text"][begin:end]
    expected = choice["text"][: choice["text"].index(stop)]
    cut, _ = complete(cluster, [], **params, stop=[stop])
    assert cut["choices"][0]["text"] == expected
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["stop_reason"] == stop
    got = stream(cluster, body_of([], **params, stop=[stop]))
    assert got.text == expected
    assert got.finish_reason == "stop"
    assert got.done
    assert (roles(cluster, trace) == ["prefill", "decode"]) == (sentences > 2)


# ---- usage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_tells_usage_where_it_was_asked_for_and_nowhere_else(
    cluster: Cluster,
    path: str,
    options: dict[str, Any],
    wanted: bool,  # noqa: FBT001
) -> None:
    said = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [HI]}
    body = {"model": MODEL, "max_tokens": 3, "stream": True, **said, **options}
    reply = cluster.http.post(path, json=body)
    assert reply.status_code == 200
    assert reply.text.endswith("data: [DONE]\n\n")
    assert ('"usage":{' in reply.text) == wanted


HI = {"role": "user", "content": "hi"}

# ---- the edge of the context ----------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("streams", [False, True])
def test_prompts_beyond_the_context_are_told_by_one_code_and_allocate_nothing(
    cluster: Cluster,
    streams: bool,  # noqa: FBT001
) -> None:
    before, books = steps(cluster), cluster.ledger()[0]["books"]
    for length, more in (
        (CONTEXT, {}),
        (CONTEXT, {"max_tokens": 2}),
        (CONTEXT + 252, {}),
        (CONTEXT - 48, {"max_tokens": CONTEXT + 1}),
    ):
        body = {"model": MODEL, "prompt": prompt(length, 7200), "stream": streams, **more}
        reply = cluster.http.post("/v1/completions", json=body)
        assert reply.status_code == 400, (length, reply.text)
        assert reply.headers["content-type"] == "application/json"
        error = reply.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] in {"prompt", "max_tokens"}
        name = reply.headers["x-headwater-request"]
        assert cluster.http.get(f"/headwater/requests/{name}").status_code == 404
    assert steps(cluster) == before
    assert cluster.ledger()[0]["books"] == books


@pytest.mark.full
def test_the_longest_prompt_gives_the_one_token_that_there_is_room_for(cluster: Cluster) -> None:
    ids = prompt(CONTEXT - 1, 7201)
    body = {"model": MODEL, "prompt": ids, "temperature": 0, "return_token_ids": True}
    first = cluster.http.post("/v1/completions", json=body | LEADS)
    assert first.status_code == 200, first.text
    got = stream(cluster, {**body, "max_tokens": 1})  # again, from the cache
    for usage in (first.json()["usage"], got.usage):
        assert usage is not None
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (CONTEXT - 1, 1)
    check_tokens(got.token_ids, reference_of(first.json()["choices"][0]))
    assert got.finish_reason == first.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.full
def test_a_limit_beyond_the_context_ends_where_the_context_does(cluster: Cluster) -> None:
    # As vLLM has it: max_tokens is a limit, not a reservation.
    ids = prompt(CONTEXT - 48, 7202)
    body, _ = complete(cluster, ids, max_tokens=125, ignore_eos=True, **LEADS)
    got = stream(cluster, body_of(ids, max_tokens=125, ignore_eos=True))
    assert len(body["choices"][0]["token_ids"]) == 48
    check_tokens(got.token_ids, reference_of(body["choices"][0]))
    assert got.finish_reason == body["choices"][0]["finish_reason"] == "length"


# ---- empty prompts --------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": [[]]}),
        ("/v1/completions", {"prompt": [[], [5]]}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]}),
        ("/v1/responses", {"input": []}),
        ("/v1/messages", {"messages": [], "max_tokens": 2}),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_an_empty_prompt_is_answered_or_refused_and_hurts_nobody(
    cluster: Cluster,
    path: str,
    said: dict[str, Any],
    streams: bool,  # noqa: FBT001
) -> None:
    pids = [w["pid"] for w in cluster.status()["workers"]]
    reply = cluster.http.post(path, json={"model": MODEL, **said, "stream": streams})
    if reply.status_code == 200:
        assert said.get("messages")  # the template makes words of it
        assert '"finish_reason":' in reply.text
    else:
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["message"]
    body, _ = complete(cluster, prompt(20, 7300), max_tokens=2, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 2
    assert cluster.http.get("/health").status_code == 200
    assert cluster.is_ready()
    assert [w["pid"] for w in cluster.status()["workers"]] == pids


# ---- content in parts -----------------------------------------------------------------------


def conversation(role: str, content: Any) -> list[dict[str, Any]]:
    """A conversation with this content in a message of this role."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    before: dict[str, list[dict[str, Any]]] = {
        "assistant": [HI],
        "tool": [HI, {"role": "assistant", "content": None, "tool_calls": [call]}],
    }
    message = {"role": role, "content": content}
    if role == "tool":
        message["tool_call_id"] = "c1"
    return [*before.get(role, []), message, {"role": "user", "content": "Go on."}]


@pytest.mark.full
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_in_parts_is_the_same_as_its_text(cluster: Cluster, role: str) -> None:
    seed = len(role) * 31
    words = " ".join(f"{role} word {n * seed % 997}" for n in range(130))
    half = "And one more thing."

    def ask(content: Any) -> tuple[int, str, str]:
        body = {
            "model": MODEL,
            "messages": conversation(role, content),
            "temperature": 0,
            "max_tokens": 12,
        }
        reply = cluster.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        told = reply.json()
        text = told["choices"][0]["message"]["content"]
        return told["usage"]["prompt_tokens"], text, reply.headers["x-headwater-request"]

    tokens, text, trace = ask(words)
    assert tokens > 300
    assert text
    assert roles(cluster, trace) == ["prefill", "decode"]
    assert ask([{"type": "text", "text": words}])[:2] == (tokens, text)
    # Two parts are two lines: vLLM joins them with a line break.
    parts = [{"type": "text", "text": words}, {"type": "text", "text": half}]
    assert ask(parts)[:2] == ask(f"{words}\n{half}")[:2]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("streams", [False, True])
def test_no_parts_and_parts_that_are_no_text_are_no_server_error(
    cluster: Cluster,
    role: str,
    streams: bool,  # noqa: FBT001
) -> None:
    body = {"model": MODEL, "max_tokens": 2, "stream": streams}
    empty = {**body, "messages": conversation(role, [])}
    assert cluster.http.post("/v1/chat/completions", json=empty).status_code in {200, 400}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    shown = {**body, "messages": conversation(role, [picture])}
    reply = cluster.http.post("/v1/chat/completions", json=shown)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_value"
