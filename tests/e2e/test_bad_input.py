"""Bad input: refused in the client's shape, with a stable code, and no worker is bothered.

Every mistake of bad_requests.py on every route that it can be made on, streaming and not. That the
request never became work is read from the ingress (no record of it); that the workers are the same
processes and made no step, from their pids and step counters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.bad_requests import (
    CHAT,
    COMPLETIONS,
    ENDLESS_GRAMMARS,
    ENDLESS_TOOL,
    EVERYWHERE,
    MESSAGES,
    NO_REQUESTS,
    TOO_LONG,
    VALID,
    WRONG_FIELDS,
    WRONG_GRAMMARS,
    Bad,
)
from tests.e2e.client import complete
from tests.e2e.conftest import MODEL, Cluster
from tests.e2e.corpus import prompt
from tests.e2e.quiet import steps

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STABLE = re.compile(r"[a-z]+(_[a-z]+)*")


@pytest.fixture
def untouched(cluster: Cluster) -> Iterator[None]:
    """The workers after the test are those before it, and made no step."""
    before = steps(cluster)
    assert len(before) == 2
    yield
    assert steps(cluster) == before


def refusal(reply: httpx.Response) -> tuple[str, str | None]:
    """(code, param) of an answer in the shape of its route, whatever its status."""
    assert reply.headers["content-type"] == "application/json"
    told = reply.json()
    error = told["error"]
    assert isinstance(error["message"], str)
    assert error["message"].strip()
    if reply.request.url.path.startswith(MESSAGES):
        assert told.keys() == {"type", "error"}
        assert told["type"] == "error"
        assert error["type"].endswith(("_error", "_too_large"))
        code, param = error["details"]["error_code"], None
    else:
        assert told.keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"]
        code, param = error["code"], error["param"]
    assert STABLE.fullmatch(code), code
    return code, param


def check(cluster: Cluster, bad: Bad) -> list[httpx.Response]:
    """Make this mistake in each way, and look at what is told; the answers."""
    replies = []
    for sent in bad.requests():
        reply = cluster.http.post(sent.path, content=sent.content, headers=sent.headers)
        where = f"{bad.name} on {sent.path}: {reply.text[:300]}"
        assert reply.status_code == bad.status, where
        code, param = refusal(reply)
        assert code == bad.code, where
        if not sent.path.startswith(MESSAGES):
            assert param == bad.param_on(sent.path), where
        replies.append(reply)
    assert replies
    return replies


def no_work_came_of(cluster: Cluster, replies: list[httpx.Response]) -> None:
    names = [
        r.headers["x-headwater-request"] for r in replies if "x-headwater-request" in r.headers
    ]
    for name in names:
        assert cluster.http.get(f"/headwater/requests/{name}").status_code == 404


@pytest.mark.parametrize("kind", [NO_REQUESTS, WRONG_FIELDS, WRONG_GRAMMARS, TOO_LONG])
@pytest.mark.usefixtures("untouched")
def test_a_mistake_is_told_with_its_code_and_field_and_reaches_no_worker(
    cluster: Cluster, kind: list[Bad]
) -> None:
    for bad in kind:
        no_work_came_of(cluster, check(cluster, bad))


def test_a_grammar_that_nothing_can_follow_is_the_clients_mistake(cluster: Cluster) -> None:
    before = [w["pid"] for w in cluster.status()["workers"]]
    for bad in ENDLESS_GRAMMARS:
        check(cluster, bad)
    body, _ = complete(cluster, prompt(40, 8000), max_tokens=2)
    assert body["usage"]["completion_tokens"] == 2
    assert [w["pid"] for w in cluster.status()["workers"]] == before


def test_a_tool_that_nothing_can_call_fails_where_its_grammar_ends(cluster: Cluster) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Call it."}],
        "tools": [ENDLESS_TOOL],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 40,
    }
    at_once = cluster.http.post(CHAT, json=body)
    assert (at_once.status_code, refusal(at_once)) == (400, ("invalid_value", "tools"))
    # Its first words can be said, so that the stream has begun when it turns out.
    text = cluster.http.post(CHAT, json={**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:6] == "data: "]
    *said, last = [json.loads(line) for line in lines if line != "[DONE]"]
    assert (last["error"]["code"], last["error"]["param"]) == ("invalid_value", "tools"), last
    assert all(event["choices"][0]["finish_reason"] is None for event in said)


@pytest.mark.usefixtures("untouched")
def test_unknown_routes_and_wrong_methods_are_told_in_the_same_shape(cluster: Cluster) -> None:
    for method in ("GET", "POST", "DELETE"):
        reply = cluster.http.request(method, "/v1/nope", json={})
        assert (reply.status_code, refusal(reply)) == (404, ("not_found", None))
    for path in EVERYWHERE:
        reply = cluster.http.get(path)
        assert (reply.status_code, refusal(reply)) == (405, ("method_not_allowed", None))
        assert "POST" in reply.headers["allow"]
    reply = cluster.http.get("/headwater/requests/no-such")
    assert (reply.status_code, refusal(reply)) == (404, ("not_found", None))


@pytest.mark.usefixtures("untouched")
def test_a_body_beyond_the_limit_is_refused_on_every_route(cluster: Cluster) -> None:
    body = b'{"prompt": "' + b"x" * (33 << 20) + b'"}'
    for path in (COMPLETIONS, MESSAGES, "/tokenize"):
        reply = cluster.http.post(path, content=body, headers={"content-type": "application/json"})
        assert (reply.status_code, refusal(reply)[0]) == (413, "request_too_large")


@pytest.mark.usefixtures("untouched")
def test_no_value_of_any_field_that_is_documented_is_a_server_error(cluster: Cluster) -> None:
    documented = cluster.http.get("/openapi.json").json()
    asked = 0
    for path, valid in VALID.items():
        for name in fields_of(documented, path):
            for value in (5.5, "\0", [None], {"x": [1]}, -1, [[]]):
                if name == "max_tokens" and value == 5.5:
                    continue
                # Never valid as a whole: the model's name is wrong too, so that nothing is made.
                body = {**valid, name: value, **({} if name == "model" else {"model": "nope"})}
                reply = cluster.http.post(path, json=body)
                assert reply.status_code in {400, 404}, f"{path} {name}={value!r}: {reply.text}"
                refusal(reply)
                asked += 1
    assert asked > 1000


def fields_of(documented: dict[str, object], path: str) -> list[str]:
    """The fields of a route's body, as its OpenAPI document names them."""
    names: set[str] = set()

    def walk(schema: dict[str, object]) -> None:
        reference = schema.get("$ref")
        if isinstance(reference, str):
            schema = documented["components"]["schemas"][reference.rpartition("/")[2]]  # type: ignore[index]
        names.update(schema.get("properties", {}))  # type: ignore[call-overload]
        for key in ("anyOf", "oneOf", "allOf"):
            for one in schema.get(key, []):  # type: ignore[attr-defined]
                walk(one)

    post = documented["paths"][path]["post"]  # type: ignore[index]
    walk(post["requestBody"]["content"]["application/json"]["schema"])
    return sorted(names)


def test_what_is_odd_but_means_something_is_answered(cluster: Cluster) -> None:
    before = [w["pid"] for w in cluster.status()["workers"]]
    huge = "x" * 9000
    for path, members in (
        (COMPLETIONS, {"request_id": "x" * 128}),
        (COMPLETIONS, {"request_id": 'a\n\0"}'}),
        (COMPLETIONS, {"unknown_field": 1}),
        (COMPLETIONS, {"logit_bias": {"1": 1e9}}),
        (CHAT, {"messages": [{"role": "someone", "content": "hi"}]}),
        (CHAT, {"metadata": {"\u0000": "x"}}),
    ):
        reply = cluster.http.post(
            path, json={**VALID[path], **members}, headers={"x-request-id": huge}
        )
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 2
        assert len(reply.text) < 5000  # nothing of it comes back
    text = json.dumps(VALID[COMPLETIONS])[:-1] + f', "model": "nope", "model": "{MODEL}"}}'
    reply = cluster.http.post(
        COMPLETIONS, content=text, headers={"content-type": "application/json"}
    )
    assert reply.status_code == 200  # the last one counts, for our checks and for vLLM's
    assert [w["pid"] for w in cluster.status()["workers"]] == before
