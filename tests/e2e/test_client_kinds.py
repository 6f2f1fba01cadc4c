"""Clients that were shut out or lost data, against the running cluster."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.e2e.conftest import MODEL, Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
ASK = {"role": "user", "content": "Go on."}
LONG = "one two three " * 20


def raw(cluster: Cluster, request: str, body: bytes) -> bytes:
    """Send bytes on a connection of their own, and read to its end."""
    parts = urlsplit(cluster.endpoint)
    head = request.format(length=len(body)).encode()
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(head + body)
        got = b""
        while part := connection.recv(1 << 16):
            got += part
    return got


def completion(**more: Any) -> bytes:
    fields = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "temperature": 0, **more}
    return json.dumps(fields).encode()


def test_request_that_offers_h2c_keeps_its_body(cluster: Cluster) -> None:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        f"{OFFER}Content-Length: {{length}}\r\n\r\n"
    )
    last = b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    body = completion()
    got = raw(cluster, head.replace("{length}", str(len(body))), body + last)
    assert got.count(b"HTTP/1.1 200 OK") == 2
    assert b'"completion_tokens":2' in got


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_client_gets_no_chunks(
    cluster: Cluster,
    stream: bool,  # noqa: FBT001
) -> None:
    head = (
        "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        "Content-Length: {length}\r\n\r\n"
    )
    got = raw(cluster, head, completion(stream=stream))
    headers, _, body = got.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in headers.lower()
    if stream:
        assert body.startswith(b"data: ")
        assert body.rstrip().endswith(b"data: [DONE]")
    else:
        assert json.loads(body)["choices"][0]["finish_reason"] == "length"


def test_answers_carry_the_client_s_request_id(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="none") as client:
        named = client.completions.create(
            model=MODEL, prompt="Hi", max_tokens=1, extra_headers={"X-Request-Id": "my.id-1"}
        )
        assert named._request_id == "my.id-1"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.completions.create(model=MODEL, prompt="Hi", temperature=-1)
        assert wrong.value.request_id
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError) as unknown:
            client.models.retrieve("no/such-model")
        assert unknown.value.code == "model_not_found"


def test_items_with_several_texts_are_counted_whole(cluster: Cluster) -> None:
    def tokens(*texts: str) -> int:
        parts = [{"type": "output_text", "text": text} for text in texts]
        items = [ASK, {"type": "message", "role": "assistant", "content": parts}, ASK]
        body = {"model": MODEL, "input": items, "max_output_tokens": 1, "store": False}
        return int(cluster.http.post("/v1/responses", json=body).json()["usage"]["input_tokens"])

    assert tokens("Hi!", LONG) >= tokens("Hi!") + 40


def test_billing_line_goes_and_the_prompt_stays(cluster: Cluster) -> None:
    def tokens(text: str) -> int:
        system = [{"type": "text", "text": text}]
        body = {"model": MODEL, "messages": [ASK], "system": system}
        reply = cluster.http.post("/v1/messages/count_tokens", json=body)
        return int(reply.json()["input_tokens"])

    assert tokens(f"x-anthropic-billing-header: cch=eb6c6;\n{LONG}") == tokens(LONG)


def test_broken_character_keeps_the_prompt_out_of_answers(cluster: Cluster) -> None:
    reply = cluster.http.post("/tokenize", json={"model": MODEL, "prompt": "The sign is 𓀀"})
    prompt = reply.json()["tokens"][:-1]
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0}
    whole = cluster.http.post("/v1/completions", json=fields).json()
    text = whole["choices"][0]["text"]
    assert "sign" not in text
    assert whole["usage"]["prompt_tokens"] == len(prompt)
    events = cluster.http.post("/v1/completions", json={**fields, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in events.split("\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_ignored_keyword_and_server_tool_are_named(cluster: Cluster) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer", "multipleOf": 7}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": MODEL, "messages": [ASK], "response_format": response_format}
    reply = cluster.http.post("/v1/chat/completions", json=body)
    assert (reply.status_code, "multipleOf" in reply.json()["error"]["message"]) == (400, True)
    tool = {"type": "web_search_20250305", "name": "web_search"}
    body = {"model": MODEL, "messages": [ASK], "max_tokens": 1, "tools": [tool]}
    reply = cluster.http.post("/v1/messages", json=body)
    assert (reply.status_code, tool["type"] in reply.json()["error"]["message"]) == (400, True)
