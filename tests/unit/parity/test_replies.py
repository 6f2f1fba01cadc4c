"""The parity requests are sent in an order that their caches allow."""

from __future__ import annotations

import json
import threading
from collections import defaultdict

import httpx

from tests.e2e.parity.asking import Ask
from tests.e2e.parity.replies import replies_to

WAIT_S = 30.0


def test_replies_to_sends_one_salt_in_order_others_beside_it() -> None:
    beside = threading.Barrier(2)
    seen = defaultdict[str, list[str]](list)

    def answer(request: httpx.Request) -> httpx.Response:
        salt = json.loads(request.content)["cache_salt"].rpartition(" ")[2]
        seen[salt].append(request.url.path)
        beside.wait(WAIT_S)
        return httpx.Response(200, json={})

    asks = [Ask(f"{salt}{path}", path, {}, salt=salt) for salt in "ab" for path in ("/1", "/2")]
    with httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer)) as http:
        replies = replies_to(http, asks, at_once=2)
    assert {name: reply.status for name, reply in replies.items()} == {a.name: 200 for a in asks}
    assert seen == {"a": ["/1", "/2"], "b": ["/1", "/2"]}
