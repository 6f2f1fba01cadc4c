"""A detached cluster with API keys: who is let in, who shares blocks, what limits count, what is
shown, and `serve --detach`, `logs` and `stop`.

A cluster of its own, since one that has had keys stays closed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import running
from cluster.key_store import KeyStore
from cluster.serve_output import FILE
from deployments.edge.keys import KeyLimits, KeyScope, digest_of, local_operator_key
from tests.e2e.conftest import (
    COMMAND,
    MODEL,
    ROOT,
    START_TIMEOUT_S,
    Cluster,
    serving_detached,
    wait_clean,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "Tell of the lighthouse and of its keeper, who counts the ships. " * 12
WAIT_S = 30.0
STREAM_TIMEOUT_S = 180.0
NAMES = {
    "ann": ("team", KeyScope.API, KeyLimits()),
    "ben": ("team", KeyScope.API, KeyLimits()),
    "cara": ("cara", KeyScope.API, KeyLimits()),
    "dora": ("dora", KeyScope.API, KeyLimits(tokens_per_min=20)),
    "evan": ("evan", KeyScope.API, KeyLimits(requests_per_min=1)),
    "fay": ("fay", KeyScope.API, KeyLimits(concurrent=1)),
    "boss": ("boss", KeyScope.OPERATOR, KeyLimits()),
}


@dataclass
class Keyed:
    """The cluster, the keys by name, and what `serve` has printed."""

    cluster: Cluster
    store: KeyStore
    keys: dict[str, str]
    greeting: str

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys.get(name, name)}"} if name else {}

    def get(self, path: str | httpx.URL, name: str = "") -> httpx.Response:
        return self.cluster.http.get(path, headers=self.headers(name))

    def ask(self, name: str, prompt: str = PROMPT, **more: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0} | more
        return self.cluster.http.post("/v1/completions", json=body, headers=self.headers(name))

    def use_of(self, name: str) -> dict[str, Any]:
        told = self.get("/headwater/status", "boss").json()["keys"]["keys"]
        (found,) = [one for one in told if one["name"] == name]
        return dict(found)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Keyed]:
    assert model_path.exists()
    state = tmp_path_factory.mktemp("keyed")
    store = KeyStore(state / "keys.json")
    keys = {name: store.add(name, *what) for name, what in NAMES.items()}
    with serving_detached(state, "--dtype", "float32") as (cluster, greeting):
        # The greeting was asked for with a key.
        yield Keyed(cluster, store, keys, greeting)
        cluster.http.headers["authorization"] = f"Bearer {keys['boss']}"
        wait_until(cluster.is_ready, timeout_s=START_TIMEOUT_S, what="workers back")
        wait_clean(cluster)


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_nothing_but_health_and_readiness_answers_without_a_key(keyed: Keyed) -> None:
    assert keyed.get("/health").status_code == keyed.get("/ready").status_code == 200
    paths = ["/v1/models", "/headwater/status", "/metrics", "/docs", "/nothing", "/"]
    odd = httpx.URL(keyed.cluster.endpoint).copy_with(raw_path=b"//health")
    for path in [*paths, odd]:
        assert keyed.get(path).status_code == 401, path
        assert keyed.get(path, "hw-wrong").status_code == 401, path
    assert keyed.ask("").status_code == keyed.ask("hw-wrong").status_code == 401
    assert keyed.get("/headwater/status", "ann").status_code == 403
    assert keyed.get("/headwater/status", "boss").status_code == 200


def test_keys_of_one_tenant_share_blocks_and_others_do_not(keyed: Keyed) -> None:
    assert cached(keyed.ask("ann")) == 0
    assert cached(keyed.ask("ben")) > 0
    assert cached(keyed.ask("cara")) == 0
    header = keyed.headers("cara") | {"x-api-key": keyed.keys["ann"]}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
    both = keyed.cluster.http.post("/v1/completions", json=body, headers=header)
    assert both.status_code == 401, "two keys are none"


def test_tokens_are_counted_as_the_answers_tell_them_and_bound_the_next(keyed: Keyed) -> None:
    before = keyed.use_of("dora")["tokens_total"]
    answer = keyed.ask("dora")
    usage = answer.json()["usage"]

    def counted() -> bool:
        return bool(keyed.use_of("dora")["tokens_total"] - before == usage["total_tokens"])

    wait_until(counted, timeout_s=WAIT_S, what="the tokens to be charged")
    refused = keyed.ask("dora")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    debt_s = (usage["total_tokens"] - 20) * 3
    # The bucket refills while we wait for the charge.
    assert int(refused.headers["retry-after"]) >= debt_s - 2 * WAIT_S


def test_a_request_too_many_is_told_when_to_come_back(keyed: Keyed) -> None:
    answers = [keyed.ask("evan", "Hi", max_tokens=1) for _ in range(2)]
    assert answers[0].status_code == 200
    assert answers[-1].status_code == 429
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60


def test_one_stream_at_a_time_until_it_ends_and_a_revoked_key_s_stream_ends_in_peace(
    keyed: Keyed,
) -> None:
    begun, left = threading.Event(), list[str]()

    def stream() -> None:
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 120, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        with keyed.cluster.http.stream(
            "POST", "/v1/completions", json=body, headers=keyed.headers("fay")
        ) as answer:
            for line in answer.iter_lines():
                begun.set()
                left.append(line)

    streaming = threading.Thread(target=stream)
    streaming.start()
    assert begun.wait(WAIT_S)
    assert keyed.ask("fay", "Hi").status_code == 429
    assert keyed.ask("fay", "Hi", n=2).status_code == 429
    keyed.store.revoke("fay")

    def is_out() -> bool:
        return keyed.ask("fay", "Hi").status_code == 401

    wait_until(is_out, timeout_s=WAIT_S, what="the revoked key to be refused")
    streaming.join(STREAM_TIMEOUT_S)
    assert not streaming.is_alive()
    assert "data: [DONE]" in left
    assert keyed.ask("ann", "Hi").status_code == 200


def test_our_own_commands_have_a_key(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWATER_API_KEY", raising=False)
    status = keyed.cluster.cli("status", "--json")
    assert status.returncode == 0, status.stderr
    trace = keyed.ask("ann", "Hi").headers["x-headwater-request"]
    explained = keyed.cluster.cli("explain", trace)
    assert explained.returncode == 0, explained.stderr
    words = ["run", "--requests", "2", "--input-tokens", "16", "--output-tokens", "2"]
    loaded = keyed.cluster.cli("load", *words, "--concurrency", "1", timeout_s=120)
    assert loaded.returncode == 0, loaded.stderr
    demo = keyed.cluster.cli("demo", "--no-kill", timeout_s=180)
    assert demo.returncode == 0, demo.stderr


def test_detached_serve_and_each_worker_have_logs(keyed: Keyed) -> None:
    cluster = keyed.cluster
    here = running.read(cluster.state_dir)
    assert f"pid {here.pid}" in keyed.greeting
    assert cluster.cli("logs").stdout == (cluster.state_dir / FILE).read_text()
    told = json.loads(cluster.cli("status", "--json").stdout)
    for name in (told["ingress"], *(worker["id"] for worker in told["workers"])):
        assert cluster.cli("logs", name).stdout.startswith(f"==> {here.logs}/")


@pytest.mark.chaos
def test_logs_are_followed_past_a_killed_worker(keyed: Keyed, tmp_path: Path) -> None:
    told = keyed.get("/headwater/status", "boss").json()
    (worker,) = [one for one in told["workers"] if one["role"] == "decode"]
    words = ("logs", str(worker["id"]), "-f", "--state-dir", str(keyed.cluster.state_dir))
    files = [tmp_path / "followed", tmp_path / "followed-errors"]
    with files[0].open("wb") as output, files[1].open("wb") as errors:
        following = subprocess.Popen([*COMMAND, *words], cwd=ROOT, stdout=output, stderr=errors)
    try:
        wait_until(
            lambda: f"-{worker['pid']}." in files[0].read_text(), timeout_s=60, what="its log"
        )
        os.kill(int(worker["pid"]), signal.SIGKILL)
        wait_until(
            lambda: "going on with decode-" in files[1].read_text(),
            timeout_s=START_TIMEOUT_S,
            what="its replacement",
        )
        pid = files[1].read_text().rpartition("(pid ")[2].partition(")")[0]
        wait_until(
            lambda: f"-{pid}." in files[0].read_text(), timeout_s=60, what="the replacement's log"
        )
    finally:
        following.send_signal(signal.SIGINT)
        assert following.wait(30) == 0
    wait_until(keyed.cluster.is_ready, timeout_s=START_TIMEOUT_S, what="workers back")


WRONG = "hw-planted-wrong-key"


def test_no_log_no_command_line_and_no_file_holds_a_key(keyed: Keyed) -> None:
    for name in ("ann", "boss", WRONG):  # each has been seen
        keyed.ask(name, "Hi", max_tokens=1)
        keyed.get("/headwater/status", name)
    state = keyed.cluster.state_dir
    secret = (state / "secret").read_bytes().strip()
    planted = [key.encode() for key in keyed.keys.values()]
    planted += [WRONG.encode(), secret, local_operator_key(secret).encode()]
    planted += [digest_of(key.encode()).hex().encode() for key in keyed.keys.values()]
    looked_at, guilty = 0, list[str]()
    folders = [state, keyed.cluster.ray_session() / "logs"]
    for path in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        if path.name in {"secret", "keys.json"}:
            continue
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # rotated, or a temporary one
            continue
        looked_at += 1
        guilty += [str(path) for one in planted if one in content]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            environment = (folder / "environ").read_bytes() if _is_ray(command) else b""
        except OSError:  # gone, or somebody else's
            continue
        looked_at += 1
        guilty += [f"{folder} {command[:80]!r}" for one in planted if one in command + environment]
    assert looked_at > 20
    assert guilty == []


def _is_ray(command: bytes) -> bool:
    return re.search(rb"ray::|raylet|gcs_server", command) is not None
