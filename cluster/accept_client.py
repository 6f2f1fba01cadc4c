"""What `headwater accept` needs of a cluster, and the client that gives it over HTTP.

`AcceptClient` is the seam: cluster/accept_checks.py checks over it, and tests plant their failures
in a fake one. It asks for token ids and logprobs, since texts can be equal where tokens are not.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from cluster import credentials
from cluster.ask import DATA, DONE, REQUEST_HEADER, connect, get_json, refusal
from cluster.demo_client import Worker, found
from cluster.errors import AnswerError

PATH = "/v1/completions"
TIMEOUT_S = 300.0
TOKEN_PREFIX = "token_id:"  # noqa: S105 - vLLM's, of return_tokens_as_token_ids
ALTERNATIVES = 5


@dataclass(frozen=True, slots=True)
class Question:
    """A greedy completion. prompt: text or token ids. salt: who has another finds no block of it.

    exactly_tokens: so many are made, whatever the model would like to end with.
    """

    prompt: str | Sequence[int]
    salt: str
    exactly_tokens: int


@dataclass(slots=True)
class Reply:
    """Tokens in order, each with the logprobs of the likeliest ones there, itself included."""

    trace_id: str = ""
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    cached_tokens: int = 0


class AcceptClient(Protocol):
    """A cluster as the checks see it. Everything may raise AnswerError."""

    def context_tokens(self) -> int:
        """Longest request, prompt and output together."""

    def complete(
        self, question: Question, on_tokens: Callable[[Reply], None] | None = None
    ) -> Reply:
        """The whole answer, streamed; on_tokens sees it grow."""

    def record(self, trace_id: str) -> Mapping[str, Any]:
        """The request's record: attempts, decisions, blocks."""

    def status(self) -> Mapping[str, Any]:
        """/headwater/status."""

    def ledger(self) -> Sequence[Mapping[str, Any]]:
        """/headwater/ledger with a scan of the slots, an entry a node."""

    def kill(self, worker: Worker) -> None:
        """SIGKILL. Raises KillRefusedError where it is not a process of this very cluster."""


class HttpClient:
    """A cluster at a URL."""

    def __init__(
        self,
        endpoint: str,
        kill: Callable[[Worker], None],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """kill: see AcceptClient. Raises AnswerError where no model is served there."""
        self._endpoint, self._kill, self._timeout_s = endpoint, kill, timeout_s
        models = get_json(endpoint, "/v1/models")
        self.model = str(found(models, "data", 0, "id"))
        self._context = int(found(models, "data", 0, "max_model_len"))

    def context_tokens(self) -> int:
        """As the list of models has it."""
        return self._context

    def complete(
        self, question: Question, on_tokens: Callable[[Reply], None] | None = None
    ) -> Reply:
        """One streamed request."""
        connection = connect(self._endpoint, self._timeout_s)
        reply = Reply()
        try:
            path = urlsplit(self._endpoint).path.rstrip("/") + PATH
            headers = {
                "content-type": "application/json",
                "connection": "close",
                **credentials.headers(self._endpoint),
            }
            connection.request("POST", path, self._body(question), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise AnswerError(refusal(response.status, response.read()))
            reply.trace_id = response.headers.get(REQUEST_HEADER, "")
            _read(response, reply, on_tokens)
        except (OSError, http.client.HTTPException) as failed:
            what = str(failed) or type(failed).__name__
            raise AnswerError(f"the connection to {self._endpoint} failed: {what}") from failed
        finally:
            connection.close()
        if len(reply.tokens) != question.exactly_tokens:
            raise AnswerError(
                f"{question.exactly_tokens} tokens were asked for, {len(reply.tokens)} came"
            )
        return reply

    def record(self, trace_id: str) -> Mapping[str, Any]:
        """The first choice's; there is but one."""
        path = f"/headwater/requests/{quote(trace_id, safe='')}"
        record: Mapping[str, Any] = found(self._get(path), "records", 0)
        return record

    def status(self) -> Mapping[str, Any]:
        """From the ingress."""
        status = self._get("/headwater/status")
        found(status, "workers")
        return status

    def ledger(self) -> Sequence[Mapping[str, Any]]:
        """From the nodes' agents, through the ingress."""
        nodes: Sequence[Mapping[str, Any]] = found(
            self._get("/headwater/ledger?scan=true"), "nodes"
        )
        return nodes

    def kill(self, worker: Worker) -> None:
        """As it was given."""
        self._kill(worker)

    def _get(self, path: str) -> dict[str, Any]:
        return get_json(self._endpoint, path)

    def _body(self, question: Question) -> bytes:
        fields = {
            "model": self.model,
            "prompt": question.prompt,
            "cache_salt": question.salt,
            "max_tokens": question.exactly_tokens,
            "min_tokens": question.exactly_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "logprobs": ALTERNATIVES,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(fields).encode()


def _read(lines: Iterable[bytes], reply: Reply, on_tokens: Callable[[Reply], None] | None) -> None:
    """Take a stream in, up to its [DONE]. Mutates reply. Raises AnswerError."""
    for line in lines:
        if not line.startswith(DATA):
            continue
        payload = line.removeprefix(DATA).strip()
        if payload == DONE:
            return
        try:
            event = json.loads(payload)
            if "error" in event:
                raise AnswerError(f"the answer ended in an error: {event['error']}")
            _take(event, reply)
        except (ValueError, LookupError, TypeError, AttributeError) as odd:
            raise AnswerError(f"the endpoint sent no completion event: {payload[:200]!r}") from odd
        if on_tokens is not None and reply.tokens:
            on_tokens(reply)
    raise AnswerError("the connection ended before the answer did")


def _take(event: Mapping[str, Any], reply: Reply) -> None:
    usage = event.get("usage")
    if usage:
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event["choices"]:
        reply.prompt += choice.get("prompt_token_ids") or []
        tokens = choice.get("token_ids") or []
        reply.tokens += tokens
        if tokens:
            given = choice["logprobs"]
            for token, own, others in zip(
                tokens, given["token_logprobs"], given["top_logprobs"], strict=True
            ):
                likeliest = {
                    int(name.removeprefix(TOKEN_PREFIX)): float(value)
                    for name, value in others.items()
                }
                reply.logprobs.append({**likeliest, token: float(own)})
