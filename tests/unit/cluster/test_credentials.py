"""Which key our own commands show, and to whom."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import ask, credentials, running
from cluster.errors import AnswerError
from deployments.edge.keys import local_operator_key
from tests.unit.cluster import fake_endpoint
from tests.unit.cluster.fake_endpoint import Endpoint

SECRET = b"the secret of this cluster"
OPERATOR = f"Bearer {local_operator_key(SECRET)}"
ELSEWHERE = "http://elsewhere.example:8000"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(credentials.KEY_VARIABLE, raising=False)
    monkeypatch.setattr(credentials, "_STATE_DIRS", {})


@pytest.fixture
def here(tmp_path: Path, server: Endpoint) -> Endpoint:
    """The endpoint of a cluster that runs on this machine, as the serve command writes it down."""
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    ticks = running.started_ticks(os.getpid())
    assert ticks is not None
    me = running.Running(os.getpid(), ticks, server.url, None, "app", "m")
    running.write(tmp_path, me)
    credentials._STATE_DIRS.clear()
    assert running.read(tmp_path) == me
    server.objects["/headwater/status"] = {"workers": []}
    return server


def test_without_a_key_nothing_is_shown() -> None:
    assert credentials.headers(ELSEWHERE, "/headwater/status") == {}


def test_the_cluster_that_runs_here_is_shown_the_operator_s_key(here: Endpoint) -> None:
    ask.get_json(here.url, "/headwater/status")
    here.answers.append(fake_endpoint.answer("hello"))
    ask.ask(here.url, "m", "hi", lambda _: None)
    assert [given["authorization"] for given in here.headers] == [OPERATOR] * 2


def test_each_ingress_of_the_cluster_here_is_shown_it(here: Endpoint, tmp_path: Path) -> None:
    second = "http://127.0.0.1:1"
    running.write(tmp_path, replace(running.read(tmp_path), more_endpoints=[here.url, second]))
    credentials._STATE_DIRS.clear()
    running.read(tmp_path)
    assert credentials.headers(second, "/headwater/status") == {"authorization": OPERATOR}


def test_no_other_endpoint_is_shown_it(here: Endpoint) -> None:
    port = here.url.rpartition(":")[2]
    for other in (ELSEWHERE, f"http://127.0.0.1:{int(port) + 1}", f"http://localhost:{port}"):
        assert credentials.headers(other, "/headwater/status") == {}


def test_a_key_in_the_environment_goes_everywhere_but_where_the_operator_s_is_known(
    here: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(credentials.KEY_VARIABLE, " hw-mine ")
    mine = {"authorization": "Bearer hw-mine"}
    assert credentials.headers(ELSEWHERE, "/headwater/status") == mine
    assert credentials.headers(here.url, "/v1/models") == mine
    assert credentials.headers(here.url, "/headwater/status") == {"authorization": OPERATOR}


@pytest.mark.parametrize("content", [None, b"", b"\n"])
def test_a_secret_that_cannot_be_read_makes_no_key(
    content: bytes | None, here: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").unlink()
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    assert credentials.headers(here.url, "/headwater/status") == {}
    monkeypatch.setenv(credentials.KEY_VARIABLE, "hw-mine")
    assert credentials.headers(here.url, "/headwater/x") == {"authorization": "Bearer hw-mine"}


@pytest.mark.parametrize("key", ["a b", "a\r\nx-evil: 1", "schlüssel"])
def test_what_no_header_can_carry_is_told_and_not_repeated(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(credentials.KEY_VARIABLE, key)
    with pytest.raises(AnswerError, match=credentials.KEY_VARIABLE) as told:
        ask.get_json(ELSEWHERE, "/v1/models")
    assert key not in str(told.value)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_for_want_of_a_key_says_where_one_goes(status: int) -> None:
    assert credentials.KEY_VARIABLE in ask.refusal(status, b'{"error": {"message": "No."}}')
    assert credentials.KEY_VARIABLE not in ask.refusal(404, b"{}")
