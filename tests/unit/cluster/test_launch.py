"""Waiting for the application: what is said meanwhile, and how a failure is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve

from cluster import launch
from cluster.config import Config
from cluster.config_links import LinksConfig
from cluster.errors import StartError
from tests.unit.cluster.fake_endpoint import Endpoint

READY = {"ready": True, "missing": [], "reasons": {}}
# As Serve 2.60 tells of a constructor that failed, shortened.
SERVE_MESSAGE = """\
The deployment failed to start 3 times in a row. This may be due to a problem with its constructor \
or initial health check failing. See controller logs for details. Error:
ray::ServeReplica:headwater:DecodeWorker.initialize_and_get_metadata() (pid=7, ip=127.0.0.1)
  File "ray/serve/_private/replica.py", line 1, in initialize_and_get_metadata
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "deployments/workers/worker.py", line 61, in __init__
    raise RuntimeError(f"{problem}; remove it")
RuntimeError: /tmp/headwater-0 is open to others (mode 755); remove it
"""


def shown(status: str, message: str = "", **deployments: str | tuple[str, str]) -> Any:
    """Serve's status of one application."""
    found = {}
    for name, told in deployments.items():
        state, words = told if isinstance(told, tuple) else (told, "")
        found[name] = SimpleNamespace(status=SimpleNamespace(value=state), message=words)
    return SimpleNamespace(status=SimpleNamespace(value=status), message=message, deployments=found)


def told_by(monkeypatch: pytest.MonkeyPatch, *statuses: Any) -> None:
    """Let Serve show these, one a look; the last one from then on."""
    left = list(statuses)

    def look() -> Any:
        now = left.pop(0) if len(left) > 1 else left[0]
        return SimpleNamespace(applications={} if now is None else {launch.APP: now})

    monkeypatch.setattr(serve, "status", look)
    monkeypatch.setattr(launch, "POLL_S", 0.0)


def test_it_says_what_it_waits_for_once_each_and_returns_when_ready(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.objects["/ready"] = READY
    healthy = shown("RUNNING", Ingress="HEALTHY", PrefillWorker="HEALTHY")
    starting = shown("DEPLOYING", Ingress="HEALTHY", PrefillWorker="UPDATING")
    told_by(monkeypatch, None, starting, starting, healthy)
    said: list[str] = []
    launch.wait_ready(server.url, said.append)
    assert [line.partition("] ")[2] for line in said] == [
        "Waiting for PrefillWorker: updating",
        "Waiting for links between ingress and workers",
    ]


def test_a_long_wait_is_told_again(server: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "REPEAT_S", 0.0)
    server.objects["/ready"] = READY
    starting = shown("DEPLOYING", PrefillWorker="UPDATING")
    told_by(monkeypatch, starting, starting, starting, shown("RUNNING", PrefillWorker="HEALTHY"))
    said: list[str] = []
    launch.wait_ready(server.url, said.append)
    assert sum("PrefillWorker: updating" in line for line in said) == 3


def test_a_deployment_that_fails_is_told_by_its_last_error_and_where_to_look(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_by(monkeypatch, shown("DEPLOYING", DecodeWorker=("DEPLOY_FAILED", SERVE_MESSAGE)))
    with pytest.raises(StartError) as failed:
        launch.wait_ready(server.url, print, logs="/state/ray/session/logs")
    assert str(failed.value) == (
        "the application did not start: DecodeWorker: RuntimeError: /tmp/headwater-0 is open to "
        "others (mode 755); remove it; all of it is in /state/ray/session/logs "
        "(grep -r Traceback); ./headwater doctor checks this machine"
    )


def test_an_application_that_fails_as_a_whole_is_told(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_by(monkeypatch, shown("DEPLOY_FAILED", "no such model"))
    with pytest.raises(StartError, match=r"did not start: no such model; \./headwater doctor"):
        launch.wait_ready(server.url, print)


def test_a_wait_that_is_too_long_says_what_was_missing(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_by(monkeypatch, shown("DEPLOYING", Ingress="UPDATING"))
    with pytest.raises(StartError, match=r"last: Waiting for Ingress: updating; \./headwater"):
        launch.wait_ready(server.url, lambda _: None, timeout_s=0.05)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("", "Serve does not say why"),
        ("plain words", "plain words"),
        ("ValueError: a\nb", "ValueError: a"),
        ("x.y.ModelError: none\n  File 1\ntail without a name", "x.y.ModelError: none"),
    ],
)
def test_the_last_error_of_a_message_is_found(message: str, words: str) -> None:
    assert launch.last_words(message) == words


def test_the_last_words_fit_on_a_screen() -> None:
    assert len(launch.last_words("ValueError: " + "x" * 10_000)) < 500


def test_ready_is_what_the_endpoint_says(server: Endpoint) -> None:
    assert not launch.is_ready(server.url)
    server.objects["/ready"] = READY
    assert launch.is_ready(server.url)
    server.objects["/ready"] = {"another": "program"}
    assert not launch.is_ready(server.url)


def test_a_proxy_of_the_environment_is_not_asked(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server.objects["/ready"] = READY
    assert launch.is_ready(server.url)


def cluster_of(monkeypatch: pytest.MonkeyPatch, *addresses: str, dead: str = "") -> None:
    """Let Ray show these nodes."""
    nodes = [{"NodeManagerAddress": address, "Alive": True} for address in addresses]
    nodes += [{"NodeManagerAddress": dead, "Alive": False}] if dead else []
    monkeypatch.setattr(ray, "nodes", lambda: nodes)


@pytest.mark.parametrize(
    ("links", "named"),
    [
        (LinksConfig(host="127.0.0.1"), "links.host is 127.0.0.1"),
        (LinksConfig(advertised_host="outside.example"), "links.advertised_host is outside"),
    ],
)
def test_one_address_for_nodes_at_several_is_refused(
    links: LinksConfig, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_of(monkeypatch, "10.0.0.6", "10.0.0.5")
    with pytest.raises(StartError, match=rf"{named}.* are at 10\.0\.0\.5, 10\.0\.0\.6: leave it"):
        launch._refuse_one_address_for_all(Config(links=links))
    cluster_of(monkeypatch, "10.0.0.5", "10.0.0.5", dead="10.0.0.6")
    launch._refuse_one_address_for_all(Config(links=links))


def test_every_nodes_own_address_suits_nodes_at_several(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster_of(monkeypatch, "10.0.0.6", "10.0.0.5")
    for links in (LinksConfig(), LinksConfig(host="0.0.0.0"), LinksConfig(host="::")):
        launch._refuse_one_address_for_all(Config(links=links))
