"""A stream that nobody can finish ends in an error event of its API, never in a normal finish."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import pytest

from tests.e2e.client import TIMEOUT_S
from tests.e2e.conftest import MODEL, Cluster, Together

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.chaos, pytest.mark.slow]
SAID = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
ENDLESS = {"model": MODEL, "stream": True, "ignore_eos": True}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {**ENDLESS, "prompt": "Once upon a time", "max_tokens": 1500},
    "/v1/chat/completions": {**ENDLESS, "messages": SAID, "max_tokens": 1500},
    "/v1/responses": {**ENDLESS, "input": SAID, "max_output_tokens": 1500},
    # This API knows no ignore_eos; a story is longer than what the test needs of it.
    "/v1/messages": {**ENDLESS, "messages": SAID, "max_tokens": 1500},
}
FINISHES = ('"finish_reason":"', "response.completed", "message_stop", '"stop_reason":"')


class Crowd:
    """Streams that run together; the workers die when each of them has got far enough."""

    def __init__(self, victims: list[int]) -> None:
        self._victims = victims
        self._seen = dict.fromkeys(ASKED, 0)
        self._lock = threading.Lock()
        self.killed = 0

    def got(self, path: str) -> None:
        """One more event came; kill the next worker once all have had their share."""
        with self._lock:
            self._seen[path] += 1
            if self.killed < len(self._victims) and min(self._seen.values()) >= 12:
                os.kill(self._victims[self.killed], signal.SIGKILL)
                self.killed += 1
                self._seen = dict.fromkeys(ASKED, 0)


def read(cluster: Cluster, path: str, crowd: Crowd) -> list[str]:
    """The lines of a stream, to its end."""
    lines = []
    with cluster.http.stream("POST", path, json=ASKED[path], timeout=TIMEOUT_S) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            lines.append(line)
            if line.startswith("data: "):
                crowd.got(path)
    return lines


def test_streams_of_every_api_that_met_two_deaths_end_in_an_error_event(cluster: Cluster) -> None:
    crowd = Crowd([cluster.worker("decode")["pid"], cluster.worker("prefill")["pid"]])
    calls = [lambda path=path: read(cluster, path, crowd) for path in ASKED]
    streams = dict(zip(ASKED, Together(calls).results(), strict=True))
    assert crowd.killed == 2
    for path, lines in streams.items():
        told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        last = told[-1]
        assert not [line for line in lines for word in FINISHES if word in line], path
        if path == "/v1/messages":
            assert last["type"] == "error"
            assert last["error"]["details"] == {"error_code": "poison_request"}
        else:
            assert last["error"]["code"] == "poison_request", path
        assert "not tried again" in last["error"]["message"]
        if path in {"/v1/messages", "/v1/responses"}:
            assert "event: error" in lines
        if path == "/v1/responses":
            assert last["type"] == "error"
            assert [event["sequence_number"] for event in told] == list(range(len(told)))
