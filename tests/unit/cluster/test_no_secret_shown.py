"""Planted secrets are in nothing that we write or answer: logs, answers, metrics, status, commands.

What is planted: API keys (good and wrong ones), an operator's, the cluster's secret and what is
made of it, and the digests that the file of keys holds.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cluster import cli, credentials, running
from cluster.ports import listen_briefly
from deployments.edge.edge_counts import EdgeCounts
from deployments.edge.front_door import DoorAddress, FrontDoor
from deployments.edge.http_edge import HttpTrace
from deployments.edge.key_file import KeySettings
from deployments.edge.keys import KeyLimits, digest_of, local_operator_key
from deployments.edge.tenants import Tenants
from deployments.ingress.keyed_access import KeyedAccess
from tests.unit.cluster import fake_endpoint
from tests.unit.cluster.fake_endpoint import Endpoint
from tests.unit.deployments.edge_world import CHAT, App, Events, edge_round
from tests.unit.deployments.key_world import ANN, BOSS, SECRET, everybody, write
from tests.unit.deployments.recorded_metrics import Recorded, install

ROOT = Path(__file__).resolve().parents[3]
WRONG = "hw-wrong-99999999999999999999"
PLANTED = {
    "an API key": ANN,
    "an operator's key": BOSS,
    "a key that is none": WRONG,
    "the secret": SECRET.decode(),
    "the secret's own operator key": local_operator_key(SECRET),
    "a key in base64": base64.b64encode(f"me:{BOSS}".encode()).decode(),
    "a digest": digest_of(ANN.encode()).hex(),
}


def found_in(text: str) -> list[str]:
    """Which of the planted secrets the text holds."""
    return [name for name, secret in PLANTED.items() if secret in text]


def test_what_looks_for_secrets_finds_one() -> None:
    assert found_in(f"... {ANN} ...") == ["an API key"]
    assert len(found_in(" ".join(PLANTED.values()))) == len(PLANTED)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return install(monkeypatch)


HEADERS = [
    {},
    *({"authorization": f"Bearer {key}"} for key in (ANN, BOSS, WRONG, local_operator_key(SECRET))),
    *({"x-api-key": key} for key in (ANN, WRONG)),
    {"authorization": f"Bearer {ANN}", "x-api-key": WRONG},
    {"authorization": "Basic " + PLANTED["a key in base64"]},
    {"authorization": f"Basic {WRONG}", "accept": "text/html"},
]
PATHS = [CHAT, "/v1/messages", "/headwater/status", "/health", "/nothing"]


@pytest.mark.parametrize("fails", [None, ValueError("bug")])
async def test_an_ingress_shows_no_secret_in_logs_answers_metrics_or_status(
    fails: Exception | None, recorded: Recorded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    path = write(tmp_path / "keys.json", everybody(KeyLimits(requests_per_min=5)))
    tenants = Tenants(SECRET)
    settings = KeySettings(str(path), required=True, reload_s=60)
    access = KeyedAccess(settings, SECRET, tenants, "m", EdgeCounts())
    app = App(fails=fails)
    gate = access.gate_round(edge_round(app, Events()))
    address = DoorAddress("127.0.0.1", listen_briefly("127.0.0.1", 0))
    door = FrontDoor(address, gate)
    shown: list[str] = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{address.port}") as client:
        for headers in HEADERS:
            for where in PATHS:
                for method in ("GET", "POST"):
                    content = b"{}" if method == "POST" else None
                    got = await client.request(method, where, headers=headers, content=content)
                    shown += [str(got.headers.raw), got.text, str(got.status_code)]
    path.write_text(json.dumps({"version": 1, "keys": [{"name": ANN}], BOSS: WRONG}))
    access._keys.look()
    assert access.problems()
    access._metrics.publish(gate, access._keys)
    shown += [caplog.text, str(recorded.values), str(access.as_json(0.0)), *access.problems()]
    shown += [repr(one) for one in (access, gate, access._keys, tenants, settings)]
    shown += [repr(HttpTrace("t", 0.0)), str(app.scopes)]
    assert {"200", "401", "403", "429"} <= set(shown) or fails
    assert "500" in shown or not fails
    assert "API keys read from" in caplog.text, "the log was looked at"
    assert found_in("\n".join(shown)) == []
    access.close()
    await door.close()


@pytest.fixture
def here(tmp_path: Path, server: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    """A state folder with all the secrets in it, and an endpoint that it belongs to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(credentials, "_STATE_DIRS", {})
    monkeypatch.setenv("HEADWATER_API_KEY", ANN)
    (tmp_path / "secret").write_bytes(SECRET)
    write(tmp_path / "keys.json", everybody())
    ticks = running.started_ticks(os.getpid())
    assert ticks is not None
    running.write(tmp_path, running.Running(os.getpid(), ticks, server.url, None, "app", "m"))
    return server


@pytest.mark.parametrize(
    "words",
    [
        ("config",),
        ("config", "--json"),
        ("config", "--yaml"),
        ("keys", "list"),
        ("keys", "list", "--json"),
        ("keys", "revoke", "ann"),
        ("keys", "revoke", "nobody"),
        ("status", "--once"),
        ("explain", "no-such-request"),
        ("chat",),
        ("load", "run", "--requests", "1"),
    ],
)
def test_no_command_shows_one(
    words: tuple[str, ...],
    here: Endpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115, PTH123
    here.answers += [fake_endpoint.send_json({"error": {"message": "no"}}, 401)] * 3
    cli.main([*words, "--state-dir", str(tmp_path)])
    sys.stdin.close()
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert text or words == ("chat",)
    assert found_in(text + caplog.text) == []
    kept = (tmp_path / "running.json").read_text() + (tmp_path / "keys.json").read_text()
    assert [name for name in found_in(kept) if name != "a digest"] == []


def test_a_list_of_processes_shows_none(here: Endpoint, tmp_path: Path) -> None:
    """Of a command that asks the endpoint, caught in the middle of it."""
    asked = asyncio.Event()

    def look(_: object) -> None:
        asked.set()
        commands.append(Path(f"/proc/{process.pid}/cmdline").read_bytes().decode())

    commands: list[str] = []
    here.answers.append(look)  # type: ignore[arg-type]
    words = [sys.executable, "-m", "cluster.cli", "chat", "--state-dir", str(tmp_path)]
    process = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said, _ = process.communicate(b"hello\n", timeout=60)
    assert commands
    assert "cluster.cli" in commands[0]
    assert found_in(commands[0] + said.decode()) == []
    assert here.headers[-1]["authorization"] == f"Bearer {ANN}", (
        "and yet it was shown to the server"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("keys", "add", "ann", "--key", WRONG),
        ("keys", "add", "ann", WRONG),
        ("chat", "--api-key", WRONG),
        ("status", "--api-key", WRONG),
    ],
)
def test_no_command_takes_a_key_as_an_argument(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(list(words))
    assert "takes no" in capsys.readouterr().err
