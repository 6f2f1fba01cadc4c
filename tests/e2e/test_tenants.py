"""Tenants never share cached blocks, on any endpoint, whatever the other one sends.

A tenant is who sends the same API key. That a request was cold is read from counters (tokens that
the engine computed, blocks that it loaded, what the router knew), not from a clock: what computes
as much as the first of its kind takes as long.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from deployments.edge.tenants import Tenants, salted
from tests.e2e.client import body_of
from tests.e2e.conftest import MODEL, Cluster
from tests.e2e.corpus import BLOCK, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

COMPLETIONS = "/v1/completions"
ANN, BEN = "ann's own key", "ben's own key"
ROUNDS = 30
REPLACED = "text goes here"
# A valid request for each endpoint; the prompt's text replaces REPLACED.
CHAT = [{"role": "user", "content": REPLACED}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": REPLACED, "max_tokens": 2},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [CHAT], "max_tokens": 2},
    "/v1/responses": {"input": REPLACED, "max_output_tokens": 16},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
    "/generative_scoring": {"query": REPLACED, "items": ["ice"], "label_token_ids": [9820, 787]},
    "/invocations": {"messages": CHAT, "max_tokens": 2},
}


@dataclass(frozen=True)
class Seen:
    """What one choice of a request met, by the engine's counters and the router's knowledge."""

    prompt_tokens: int
    computed: int  # of the prompt, by the engine of the first attempt
    loaded_blocks: int
    known_tokens: int  # the longest prefix that the router found anywhere

    @property
    def is_cold(self) -> bool:
        nothing = (self.loaded_blocks, self.known_tokens) == (0, 0)
        return nothing and self.computed == self.prompt_tokens

    @classmethod
    def of(cls, record: dict[str, Any]) -> Seen:
        first = record["attempts"][0]
        (decision, *_) = record["decisions"]
        counts = ("cached_tokens", "decode_cached_tokens", "slab_cached_tokens", "pulled_tokens")
        known = [candidate[name] for candidate in decision["candidates"] for name in counts]
        return cls(
            record["prompt_tokens"],
            first["kv"]["computed_tokens"] - (first["tokens"] - 1),
            first["kv"]["loaded_blocks"],
            max(decision["cached_tokens"], decision["elsewhere_tokens"], *known),
        )


def headers_of(path: str, key: str) -> dict[str, str]:
    """As the endpoint's own clients send a key; none for an empty one."""
    if not key:
        return {}
    return {"x-api-key": key} if path == "/v1/messages" else {"authorization": f"Bearer {key}"}


def ask(
    cluster: Cluster,
    body: dict[str, Any],
    key: str,
    path: str = COMPLETIONS,
    headers: dict[str, str] | None = None,
) -> list[Seen]:
    """Ask once with this key; one entry for each choice."""
    sent = {**headers_of(path, key), **(headers or {})}
    reply = cluster.http.post(path, json={"model": MODEL, **body}, headers=sent)
    assert reply.status_code == 200, reply.text
    name = reply.headers["x-headwater-request"]
    return [Seen.of(r) for r in cluster.http.get(f"/headwater/requests/{name}").json()["records"]]


def ask_ids(cluster: Cluster, ids: list[int], key: str, **params: Any) -> Seen:
    (seen,) = ask(cluster, body_of(ids, **{"max_tokens": 2, **params}), key)
    return seen


def salts_of_ann(cluster: Cluster) -> list[str]:
    """What the server itself derives for her, without a salt of hers and with one."""
    tenants = Tenants((cluster.state_dir / "secret").read_bytes().strip())
    ann = tenants.of([(b"authorization", f"Bearer {ANN}".encode())])
    return [salted(ann, None), salted(ann, "summer"), ann.hex()]


# ---- SEC-01: what another tenant sent gives no hit -----------------------------------------------


@pytest.mark.full
def test_another_tenants_prompt_is_computed_whole_thirty_times_of_thirty_and_then_its_own_hits(
    cluster: Cluster,
) -> None:
    length = 6 * BLOCK + 5
    known: list[int] = []
    for number in range(ROUNDS):
        ids = prompt(length, 9100 + number)
        # With and without a key, in turn: no key is a tenant too.
        first, other = (ANN, BEN) if number % 2 else ("", ANN)
        assert ask_ids(cluster, ids, first).is_cold
        probe = ask_ids(cluster, ids, other)
        assert probe.is_cold, (number, probe)
        for key in (first, other):  # the control: the same key hits
            warm = ask_ids(cluster, ids, key)
            assert warm.computed == length % BLOCK, (number, warm)
            known.append(warm.known_tokens)
    assert max(known) == length - length % BLOCK  # and the router does know what is whose


@pytest.mark.full
@pytest.mark.parametrize("length", [1500, 15 * BLOCK], ids=["handed over", "whole blocks"])
def test_a_long_prompt_and_each_beginning_of_it_are_cold_for_another_tenant(
    cluster: Cluster, length: int
) -> None:
    ids = prompt(length, 9200 + length)
    assert ask_ids(cluster, ids, ANN, max_tokens=8).is_cold
    for kept in (2 * BLOCK, length // 2, length):
        # Each with an end of its own, after what Ann sent.
        asked = ids[:kept] + prompt(40, 9210 + kept)
        probe = ask_ids(cluster, asked, f"{BEN} {kept}", max_tokens=8)
        assert probe.is_cold, (kept, probe)
        known = ask_ids(cluster, asked, ANN, max_tokens=8)
        assert known.computed == kept % BLOCK + 40


@pytest.mark.parametrize("path", sorted(BODIES))
def test_on_each_endpoint_a_key_shares_with_itself_alone(cluster: Cluster, path: str) -> None:
    unique = hashlib.sha256(path.encode()).hexdigest()
    text = f"{unique}: " + "Ships need lighthouses to find their way home. " * 12
    body = json.loads(json.dumps(BODIES[path]).replace(REPLACED, text))

    def cold(key: str) -> list[bool]:
        return [seen.is_cold for seen in ask(cluster, body, key, path)]

    assert cold(ANN) == [True]
    assert cold(ANN) == [False]
    assert cold(BEN) == [True]
    assert cold("") == [True]
    assert cold(BEN) == [False]


def test_a_key_is_one_tenant_on_all_endpoints_and_by_both_headers(cluster: Cluster) -> None:
    text = "One key, many ways in. " * 20
    chat = json.loads(json.dumps(BODIES["/v1/chat/completions"]).replace(REPLACED, text))
    (first,) = ask(cluster, chat, ANN, "/v1/chat/completions")
    (again,) = ask(cluster, chat, ANN, "/v1/messages")
    assert first.is_cold
    assert again.computed < BLOCK


def test_no_choice_of_many_begins_from_another_tenants_blocks(cluster: Cluster) -> None:
    ids = prompt(6 * BLOCK + 5, 9300)
    body = body_of(ids, n=4, temperature=1.0, seed=3, max_tokens=2)
    hers = ask(cluster, body, ANN)
    his = ask(cluster, body, BEN)
    # The choices of one request may share among themselves: the one that came first cannot.
    for seen in (hers, his):
        assert len(seen) == 4
        assert any(one.is_cold for one in seen)
    assert all(seen.computed < BLOCK for seen in ask(cluster, body, ANN))


@pytest.mark.full
def test_a_salt_divides_a_tenants_blocks_and_opens_nobody_elses(cluster: Cluster) -> None:
    ids = prompt(6 * BLOCK + 5, 9400)
    for salt in (None, "summer"):
        given = {} if salt is None else {"cache_salt": salt}
        assert ask_ids(cluster, ids, ANN, **given).is_cold
        assert ask_ids(cluster, ids, ANN, **given).computed == 5
    guesses = [*salts_of_ann(cluster), "summer", ANN, f"Bearer {ANN}", "nobody"]
    for key in (BEN, ""):
        for guess in guesses:
            probe = ask_ids(cluster, ids, key, cache_salt=guess)
            assert probe.is_cold, (key, guess, probe)


@pytest.mark.full
def test_headers_of_a_proxy_that_is_not_configured_choose_no_tenant(cluster: Cluster) -> None:
    ids = prompt(6 * BLOCK + 5, 9500)
    (first,) = ask(cluster, body_of(ids, max_tokens=2), ANN)
    assert first.is_cold
    for name in ("x-headwater-tenant", "x-tenant", "x-cache-salt", "x-forwarded-user"):
        for value in (ANN, *salts_of_ann(cluster)):
            asked = ids[:-1] + prompt(1, 9501)
            (probe,) = ask(cluster, body_of(asked), f"{name} {value}", headers={name: value})
            assert probe.is_cold, (name, value)


def test_two_keys_at_once_are_refused_and_bother_no_worker(cluster: Cluster) -> None:
    twice = [("authorization", f"Bearer {ANN}"), ("authorization", f"Bearer {BEN}")]
    reply = cluster.http.post(COMPLETIONS, json=body_of([500] * 40), headers=twice)
    assert reply.status_code == 400, reply.text
    assert "authorization" in reply.json()["error"]["message"]
    name = reply.headers["x-headwater-request"]
    assert cluster.http.get(f"/headwater/requests/{name}").status_code == 404


# ---- SEC-02: what steers transfers is not the client's -------------------------------------------


@contextlib.contextmanager
def listener() -> Iterator[socket.socket]:
    """A port on which nobody has any business."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        found.settimeout(0)
        yield found


def test_transfer_parameters_of_a_client_open_no_connection_and_read_nobodys_blocks(
    cluster: Cluster,
) -> None:
    ids = prompt(6 * BLOCK + 5, 9600)
    reply = cluster.http.post(
        COMPLETIONS, json=body_of(ids, max_tokens=2), headers=headers_of(COMPLETIONS, ANN)
    )
    hers = reply.headers["x-headwater-request"]
    record = cluster.record(hers)
    with listener() as port:
        steering = {
            "remote_host": "127.0.0.1",
            "remote_port": port.getsockname()[1],
            "remote_engine_id": record["attempts"][0]["worker"],
            "remote_request_id": record["request_id"],
            "remote_block_ids": list(range(10_000)),
            "do_remote_prefill": True,
            "do_remote_decode": True,
            "headwater": {"handoff": record["attempts"][0]["attempt"], "pull_from": "127.0.0.1"},
        }
        for path, given in sorted(BODIES.items()):
            for field in (
                {"kv_transfer_params": steering},
                {"vllm_xargs": {"kv_transfer_params": steering}},
                {"kv_hints": steering},
                {"ec_transfer_params": steering},
            ):
                body = {"model": MODEL, **given, **field}
                reply = cluster.http.post(path, json=body, headers=headers_of(path, BEN))
                assert reply.status_code == 400, (path, field)
        # Beside the fields that are reserved, and in headers: left unread.
        loose = body_of(ids, max_tokens=2) | {f"x_{name}": v for name, v in steering.items()}
        named = {"x-headwater-request": hers, "x-request-id": record["request_id"]}
        (probe,) = ask(cluster, loose, BEN, headers=named)
        assert probe.is_cold
        with pytest.raises(BlockingIOError):
            port.accept()
