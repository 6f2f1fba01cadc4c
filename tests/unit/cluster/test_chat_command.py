"""`headwater chat` over a scripted endpoint: history, figures, faults, Ctrl-C."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cluster import cli, running
from cluster.ask import Answer, Usage
from cluster.commands import chat
from tests.unit.cluster.fake_endpoint import (
    MODEL,
    Endpoint,
    answer,
    begin_stream,
    delta,
    send_event,
    send_json,
    stream,
    until_hung_up,
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def talk(server: Endpoint, monkeypatch: pytest.MonkeyPatch, lines: str, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return cli.main(["chat", "--endpoint", server.url, *flags])


def test_each_question_is_sent_with_the_history_and_the_system_message(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [answer("Hello Ann."), answer("You are Ann.", prompt=60, cached=32)]
    assert talk(server, monkeypatch, "I am Ann\n\nWho am I?\n", "--system", "Be brief") == 0
    system = ("system", "Be brief")
    first = ("user", "I am Ann")
    assert server.questions() == [
        [system, first],
        [system, first, ("assistant", "Hello Ann. "), ("user", "Who am I?")],
    ]
    shown = capsys.readouterr().out
    assert "You are Ann. \n[TTFT " in shown
    assert re.search(r"\[TTFT \d+ ms, .*3 tokens, prompt 60 tokens, 32 cached\]", shown)


def test_new_forgets_the_history_and_quit_ends(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [answer("One."), answer("Two.")]
    assert talk(server, monkeypatch, "a\n/new\nb\n/quit\nc\n") == 0
    assert server.questions() == [[("user", "a")], [("user", "b")]]


def test_nothing_is_shown_but_answers_when_nobody_types(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [answer("One.")]
    talk(server, monkeypatch, "a")
    assert capsys.readouterr().out.startswith("One. \n[TTFT")


def test_an_error_is_one_line_and_its_question_is_not_kept(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = send_json({"error": {"message": "the context\nis full"}}, 400)
    server.answers = [answer("One."), refusal, answer("Three.")]
    assert talk(server, monkeypatch, "a\nb\nc\n") == 1
    (line,) = (row for row in capsys.readouterr().out.splitlines() if row.startswith("error"))
    assert line == (
        "error: the endpoint refused: 400 the context is full (/new forgets the conversation)"
    )
    assert server.questions()[2] == [("user", "a"), ("assistant", "One. "), ("user", "c")]


def test_ctrl_c_during_an_answer_hangs_up_and_the_conversation_goes_on(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt_after_some_text(text: str) -> None:
        sys.stdout.write(text)
        if text == "on ":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat, "_write", interrupt_after_some_text)
    server.answers = [until_hung_up(begin_stream), answer("Two.")]
    assert talk(server, monkeypatch, "a\nb\n") == 0
    assert server.hung_up.wait(10)
    shown = capsys.readouterr().out
    assert re.search(r"^on \n\[stopped; TTFT \d+ ms\]$", shown, re.MULTILINE)
    assert server.questions()[1] == [("user", "a"), ("assistant", "on "), ("user", "b")]


def test_ctrl_c_before_the_first_token_hangs_up_too(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin_then_interrupt(to: BaseHTTPRequestHandler) -> None:
        begin_stream(to)
        send_event(to, delta(""))
        os.kill(os.getpid(), signal.SIGINT)
        while to.connection.recv(1):  # b"" or an error: the client has gone
            pass
        raise BrokenPipeError

    server.answers = [begin_then_interrupt, answer("Two.")]
    assert talk(server, monkeypatch, "a\nb\n") == 0
    assert server.hung_up.wait(10)
    assert "[stopped; no text]" in capsys.readouterr().out
    assert server.questions()[1] == [("user", "b")]


def test_without_an_endpoint_the_running_one_of_the_state_folder_is_asked(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid = os.getpid()
    mine = running.Running(pid, running.started_ticks(pid) or 0, server.url, None, "app", "mine")
    running.write(tmp_path, mine)
    server.answers = [answer("One.")]
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    assert cli.main(["chat", "--state-dir", str(tmp_path)]) == 0
    assert server.asked[0]["model"] == "mine"


def test_nothing_running_is_told_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chat", "--state-dir", str(tmp_path / "none")]) == 1
    assert "./headwater serve" in capsys.readouterr().err


def test_the_endpoint_may_end_in_v1_and_names_its_model(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [answer("One.")]
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    assert cli.main(["chat", "--endpoint", f"{server.url}/v1/"]) == 0
    assert server.asked[0]["model"] == MODEL


def test_an_endpoint_without_models_is_told(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.objects["/v1/models"] = {"data": []}
    assert talk(server, monkeypatch, "a\n") == 1
    assert "names no model" in capsys.readouterr().err


def test_an_answer_that_was_cut_at_its_limit_says_so(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [stream([delta("a"), delta(None, "length")])]
    talk(server, monkeypatch, "a\n", "--max-tokens", "1")
    assert server.asked[0]["max_tokens"] == 1
    assert "cut at --max-tokens]" in capsys.readouterr().out


def test_the_figures_are_ttft_speed_and_cached_tokens() -> None:
    usage = Usage(prompt_tokens=100, completion_tokens=21, cached_tokens=64)
    told = chat.figures(Answer("x", 0.0824, "", decode_s=2.0, usage=usage, finish_reason="stop"))
    assert told == "TTFT 82 ms, 10.0 tokens/s, 21 tokens, prompt 100 tokens, 64 cached"
