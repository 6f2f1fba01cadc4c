"""`headwater demo`: its scenes over a fake cluster, and the client that may kill."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster import cli, running
from cluster.ask import Answer, Message, Usage
from cluster.demo_client import Attempt, LocalClient, Worker, ancestors
from cluster.demo_scenes import KILL_AFTER_PIECES, WIDTH, Stage, perform, scenes
from cluster.errors import AnswerError, KillRefusedError
from cluster.running import Running, started_ticks
from tests.unit.cluster import fake_endpoint

PREFILL = Worker("p-1", "prefill", 100, "ready")
DECODE = Worker("d-1", "decode", 200, "ready")


class FakeStream:
    """Words of an answer."""

    def __init__(self, words: Sequence[str], answer: Answer) -> None:
        self.trace_id = answer.trace_id
        self._words, self._answer = words, answer

    def __iter__(self) -> Iterator[str]:
        yield from self._words

    def answer(self) -> Answer:
        return self._answer


class FakeCluster:
    """Caches whole prompts by their first message; answers with as many words as asked."""

    def __init__(self, *workers: Worker) -> None:
        self.all = list(workers) or [PREFILL, DECODE]
        self.killed: list[Worker] = []
        self.seen: set[str] = set()
        self.asked: list[list[Message]] = []
        self.refusal: KillRefusedError | None = None
        self.resumes = True
        self.pieces = 40
        self.context = 8192

    def context_tokens(self) -> int:
        return self.context

    @contextmanager
    def stream(
        self, messages: Sequence[Message], *, min_tokens: int, max_tokens: int
    ) -> Iterator[FakeStream]:
        assert 0 < min_tokens <= max_tokens
        self.asked.append(list(messages))
        warm = messages[0].content in self.seen
        self.seen.add(messages[0].content)
        usage = Usage(1000, max_tokens, 992 if warm else 0)
        words = [f" w{number}" for number in range(self.pieces)]
        trace = f"trace-{len(self.asked)}"
        yield FakeStream(words, Answer("".join(words), 0.1 if warm else 2.0, trace, 1.0, usage))

    def workers(self) -> tuple[Worker, ...]:
        return tuple(self.all)

    def attempts(self, trace_id: str) -> tuple[Attempt, ...]:
        assert trace_id.startswith("trace-")
        first = Attempt("d-1", "decode", not self.killed)
        if self.killed and self.resumes:
            return (first, Attempt("p-1", "prefill", is_running=False))
        return (first,)

    def kill(self, worker: Worker) -> None:
        if self.refusal:
            raise self.refusal
        self.killed.append(worker)

    def story(self, trace_id: str) -> str:
        return f"The story of {trace_id}.\n  A candidate."


def play(cluster: FakeCluster, *, kill: bool = True) -> str:
    shown: list[str] = []
    ticks = itertools.count()
    stage = Stage(cluster, shown.append, nonce="n0", clock=lambda: float(next(ticks)))
    perform(scenes(kill=kill), stage)
    return "".join(shown)


def words_of(shown: str) -> str:
    return " ".join(shown.split())


def test_the_scenes_tell_cold_and_warm_sharing_death_and_story_in_order() -> None:
    cluster = FakeCluster()
    shown = words_of(play(cluster))
    places = [
        shown.index(text)
        for text in (
            "1. The same long prompt",
            "cold: first token after 2000 ms, 0 of 1000 tokens cached",
            "warm: first token after 100 ms, 992 of 1000 tokens cached",
            "20.0 times sooner: 992 tokens",
            "2. Two users",
            "Ann: first token after 2000 ms, 0 of 1000",
            "Ben: first token after 100 ms, 992 of 1000",
            "3. A worker dies in mid-sentence",
            f"w{KILL_AFTER_PIECES - 1} [kill -9 200] w{KILL_AFTER_PIECES}",
            "decode worker d-1 (pid 200) was killed; prefill worker p-1 went on",
            "4. Why",
            "./headwater explain trace-5",
            "The story of trace-5.",
        )
    ]
    assert places == sorted(places)
    assert cluster.killed == [DECODE]


def test_lines_are_short_enough_for_a_terminal() -> None:
    assert all(len(line) <= WIDTH for line in play(FakeCluster()).splitlines())


def test_cold_and_warm_ask_the_very_same_and_the_users_share_only_the_system_message() -> None:
    cluster = FakeCluster()
    play(cluster)
    cold, warm, ann, ben, death = cluster.asked
    assert cold == warm
    assert ann[0] == ben[0]
    assert ann[1] != ben[1]
    assert cold[0] != ann[0]
    assert all("n0" in messages[0].content for messages in (cold, ann, death))


def test_the_long_prompt_fits_into_a_small_context() -> None:
    small, large = FakeCluster(), FakeCluster()
    small.context = 512
    play(small)
    play(large)
    assert len(small.asked[0][0].content) < len(large.asked[0][0].content) / 4


def test_a_cluster_that_caches_nothing_is_not_praised() -> None:
    class Forgetful(FakeCluster):
        @contextmanager
        def stream(
            self, messages: Sequence[Message], *, min_tokens: int, max_tokens: int
        ) -> Iterator[FakeStream]:
            self.seen.clear()
            with super().stream(messages, min_tokens=min_tokens, max_tokens=max_tokens) as one:
                yield one

    shown = words_of(play(Forgetful()))
    assert "sooner" not in shown
    assert "Warm was no faster here" in shown
    assert "Ben found nothing cached" in shown


def test_no_kill_leaves_the_death_out_and_tells_the_last_request() -> None:
    cluster = FakeCluster()
    shown = play(cluster, kill=False)
    assert cluster.killed == []
    assert "dies" not in shown
    assert "The story of trace-4." in shown


def test_a_worker_that_is_not_ours_is_not_killed_and_the_demo_goes_on() -> None:
    cluster = FakeCluster()
    cluster.refusal = KillRefusedError("pid 200 was not started here")
    shown = words_of(play(cluster))
    assert "[not killed]" in shown
    assert "No worker was killed: pid 200 was not started here." in shown
    assert "The story of trace-5." in shown


def test_an_only_worker_is_not_killed() -> None:
    cluster = FakeCluster(DECODE)
    shown = words_of(play(cluster))
    assert cluster.killed == []
    assert "there is no second worker that could go on" in shown


def test_an_answer_that_ends_too_soon_is_told() -> None:
    cluster = FakeCluster()
    cluster.pieces = KILL_AFTER_PIECES - 1
    shown = words_of(play(cluster))
    assert cluster.killed == []
    assert "the answer was over before it could be" in shown


def test_a_death_after_the_last_token_claims_nothing() -> None:
    cluster = FakeCluster()
    cluster.resumes = False
    shown = words_of(play(cluster))
    assert "went on" not in shown
    assert "its answer was complete already" in shown


def test_nothing_running_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--state-dir", str(tmp_path / "none")]) == 1
    assert "./headwater serve" in capsys.readouterr().err


# ---- the client over HTTP, and what it may kill ---------------------------------------------


def serve_command(endpoint: str = "http://127.0.0.1:1", pid: int | None = None) -> Running:
    mine = os.getpid() if pid is None else pid
    return Running(mine, started_ticks(mine) or 0, endpoint, None, "headwater", "fake-model")


@contextmanager
def sleeping_child() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def test_a_process_below_the_serve_command_is_killed() -> None:
    with sleeping_child() as child:
        LocalClient(serve_command()).kill(Worker("d", "decode", child.pid, "ready"))
        assert child.wait(10) == -signal.SIGKILL


def test_a_process_that_serve_did_not_start_is_not_killed() -> None:
    with sleeping_child() as other, sleeping_child() as child:
        client = LocalClient(serve_command(pid=other.pid))
        with pytest.raises(KillRefusedError, match="was not started by the serve command here"):
            client.kill(Worker("d", "decode", child.pid, "ready"))
        assert child.poll() is None


def test_neither_serve_itself_nor_a_process_elsewhere_is_killed() -> None:
    client = LocalClient(serve_command())
    with pytest.raises(KillRefusedError, match="was not started"):
        client.kill(Worker("d", "decode", os.getpid(), "ready"))
    with pytest.raises(KillRefusedError, match="is not a process of this machine"):
        client.kill(Worker("d", "decode", 2**22 + 1, "ready"))


def test_nothing_is_killed_for_a_serve_command_that_has_ended() -> None:
    with sleeping_child() as child:
        stale = Running(os.getpid(), 1, "http://x", None, "headwater", "m")
        with pytest.raises(KillRefusedError, match="runs no longer"):
            LocalClient(stale).kill(Worker("d", "decode", child.pid, "ready"))
        assert child.poll() is None


def test_ancestors_go_up_from_the_parent() -> None:
    with sleeping_child() as child:
        assert ancestors(child.pid)[:2] == [os.getpid(), os.getppid()]
    assert ancestors(2**22 + 1) == []


def test_the_whole_command_runs_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    attempt = {"worker": "d-1", "role": "decode", "ended_s": None}
    with fake_endpoint.endpoint() as server:
        running.write(tmp_path, serve_command(server.url))
        server.objects |= {
            "/headwater/status": {
                "workers": [
                    {"id": "d-1", "role": "decode", "pid": os.getpid(), "state": "ready"},
                    {"id": "p-1", "role": "prefill", "pid": 1, "state": "ready"},
                ]
            },
            "/headwater/requests/trace-1": {
                "records": [{"attempts": [attempt]}],
                "story": "A short story.",
            },
        }
        server.answers = [fake_endpoint.answer("some words " * 10, cached=16) for _ in range(5)]
        assert cli.main(["demo", "--state-dir", str(tmp_path)]) == 0
    shown = words_of(capsys.readouterr().out)
    assert "[not killed]" in shown  # its pid is this test's own
    assert "was not started by the serve command here" in shown
    assert shown.index("A short story.") < shown.index("That was all, in")
    assert server.asked[4]["min_tokens"] > 1
    assert server.asked[4]["temperature"] == 0


def test_an_endpoint_that_is_not_headwater_is_told() -> None:
    with fake_endpoint.endpoint() as server:
        server.objects["/headwater/status"] = {"status": "fine"}
        with pytest.raises(AnswerError, match="has no workers; is it Headwater"):
            LocalClient(serve_command(server.url)).workers()
