"""`run`, whole: from flags over real HTTP to the printed figures, the file and the exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.load import cli
from loadtests.load.flags import Here
from loadtests.load.records import Outcome, Run
from loadtests.load.stub_server import Fault, Script, StubServer
from loadtests.results import ROOT
from tests.unit.loadtests.load.stub_thread import stub

IDS = ("--token-ids", "1000:2000", "--input-tokens", "40", "--output-tokens", "6")


@pytest.fixture
def server() -> Iterator[tuple[StubServer, str]]:
    with stub(Script()) as running:
        yield running


def run(url: str, *words: str) -> int:
    return cli.main(["run", "--url", url, *IDS, *words])


def test_a_run_prints_its_conditions_and_figures_with_n_and_writes_one_file(
    server: tuple[StubServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "run.json"
    words = ("--slo", "ttft_ms=60000,tpot_ms=60000", "--output", str(output), "--label", "mine")
    assert run(server[1], "--requests", "12", "--concurrency", "3", *words) == 0
    printed = capsys.readouterr().out
    assert "12 requests measured over" in printed
    assert "12 ok (success 100.0%)" in printed
    assert "mine: workload random, input tokens 40, output tokens 6" in printed
    assert "seed 1" in printed
    assert "met ttft_ms ≤ 60000, tpot_ms ≤ 60000" in printed
    assert [line.split()[:2] for line in printed.splitlines() if line[:4] in {"TTFT", "ITL "}] == [
        ["TTFT", "12"],
        ["ITL", "60"],
    ]
    found = Run.read(output)
    assert [sample.outcome for sample in found.samples] == [Outcome.OK] * 12
    assert (found.label, found.slo) == ("mine", {"ttft_ms": 60000, "tpot_ms": 60000})
    assert found.conditions["workload"] == "random"
    assert found.conditions["concurrency"] == 3
    assert found.conditions["complete"] is True
    assert found.facts["url"] == server[1]
    assert any("vllm" in line for line in found.facts["versions"])


@pytest.mark.parametrize(("most", "code"), [("0.5", 1), ("0.6", 0), ("0.7", 0)])
def test_the_exit_code_says_whether_too_many_failed(
    most: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    # LT-02: 40 % success.
    faults = (
        *(Fault.ERROR_EVENT, Fault.ERROR_EVENT, Fault.ERROR_EVENT, Fault.CUT, Fault.ERROR_BODY),
        *(Fault.BUSY, Fault.NONE, Fault.NONE, Fault.NONE, Fault.NONE),
    )
    with stub(Script(faults=faults)) as (_, url):
        assert run(url, "--requests", "20", "--failures-max", most) == code
    printed = capsys.readouterr()
    assert "8 error_event" in printed.out
    assert "2 cut" in printed.out
    assert "2 refused" in printed.out
    assert "8 ok" in printed.out
    assert "(success 40.0%)" in printed.out
    assert "refused, request 5: 429 the stub was told to fail" in printed.out
    assert ("more than --failures-max" in printed.err) == bool(code)


def test_failures_are_let_pass_up_to_one_in_a_hundred_unless_told() -> None:
    faults = (Fault.BUSY, *(Fault.NONE,) * 99)
    with stub(Script(faults=faults)) as (_, url):
        assert run(url, "--requests", "100") == 0
    with stub(Script(faults=(Fault.BUSY, *(Fault.NONE,) * 9))) as (_, url):
        assert run(url, "--requests", "10") == 1


def test_an_open_loop_sends_what_arrives_within_its_duration(
    server: tuple[StubServer, str], tmp_path: Path
) -> None:
    output = tmp_path / "run.json"
    words = ("--rate", "40", "--arrival", "constant", "--warmup-s", "0.25", "--duration-s", "0.5")
    assert run(server[1], *words, "--output", str(output)) == 0
    found = Run.read(output)
    assert len(found.samples) == 29  # at 25, 50 .. 725 ms
    assert [sample.due_s for sample in found.samples] == [n / 40 for n in range(1, 30)]
    assert found.window_s == (0.25, 0.75)
    assert found.conditions["arrival"] == {"kind": "constant", "rate": 40}


def test_an_open_loop_ends_with_its_requests_if_they_are_over_before_the_duration(
    server: tuple[StubServer, str], tmp_path: Path
) -> None:
    output = tmp_path / "run.json"
    words = ("--rate", "100", "--requests", "5", "--duration-s", "5", "--output", str(output))
    assert run(server[1], *words) == 0
    found = Run.read(output)
    assert len(found.samples) == 5
    assert found.window_s[1] == max(sample.ended_s for sample in found.samples)


def test_a_session_is_one_arrival_of_an_open_loop(
    server: tuple[StubServer, str], tmp_path: Path
) -> None:
    output = tmp_path / "run.json"
    words = ("--workload", "conversations", "--turns", "3", "--think-s", "0", "--rate", "20")
    words += ("--arrival", "constant", "--duration-s", "0.51", "--output", str(output))
    assert run(server[1], *words) == 0
    assert len(Run.read(output).samples) >= 20
    bodies = [json.dumps(served.body["prompt"])[:-1] for served in server[0].log]
    begun = [body for body in bodies if not any(body.startswith(b) for b in bodies if b != body)]
    assert len(begun) == 10


def test_a_run_by_device_names_its_units(
    server: tuple[StubServer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server[1], "--devices", "3:1") == 0
    printed = capsys.readouterr().out
    assert "input tokens/s per prefill device (3)" in printed
    assert "output tokens/s per decode device (1)" in printed
    assert "by device, all 4:" in printed


def test_each_run_is_kept_even_where_no_file_was_named(
    server: tuple[StubServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server[1], "--requests", "2") == 0
    (found,) = (tmp_path / "results").iterdir()
    assert f"written to results/{found.name}\n" in capsys.readouterr().out
    assert len(Run.read(found).samples) == 2


def test_a_file_that_cannot_be_written_is_found_before_anything_is_sent(
    server: tuple[StubServer, str],
) -> None:
    assert run(server[1], "--output", "/proc/no/run.json") == cli.EXIT_USAGE
    assert server[0].log == []


def test_text_goes_to_chat(server: tuple[StubServer, str]) -> None:
    words = ["--text", "--api", "chat", "--plain-api", "--requests", "2"]
    assert cli.main(["run", "--url", server[1], *words]) == 0
    assert [served.path for served in server[0].log] == ["/v1/chat/completions"] * 2


def test_the_key_comes_from_a_variable_or_a_file(
    server: tuple[StubServer, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "from-the-environment")
    (tmp_path / "key").write_text("from-a-file\n")
    assert run(server[1], "--requests", "1", "--api-key-env", "MY_KEY") == 0
    assert run(server[1], "--requests", "1", "--api-key-file", str(tmp_path / "key")) == 0
    assert [served.headers["authorization"] for served in server[0].log] == [
        *("Bearer from-the-environment", "Bearer from-a-file")
    ]


def test_without_a_url_the_server_that_runs_here_is_asked(server: tuple[StubServer, str]) -> None:
    words = ["run", *IDS, "--requests", "1"]
    assert cli.main(words, lambda: Here(server[1], os.getpid())) == 0
    assert len(server[0].log) == 1


def test_ctrl_c_keeps_what_was_measured_and_says_that_it_was_cut_short(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    faults = (Fault.NONE, Fault.NONE, Fault.STALL)
    with stub(Script(faults=faults)) as (served, url):
        command = [sys.executable, "-m", "loadtests", "run", "--url", url, *IDS]
        command += ["--requests", "9", "--output", str(output), "--quiet"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            waiting = threading.Event()
            while len(served.log) < len(faults):  # until the third one is there, and stalls
                assert process.poll() is None
                waiting.wait(0.01)
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=60)
    assert process.returncode == cli.EXIT_INTERRUPTED
    found = Run.read(output)
    assert [sample.index for sample in found.samples] == [0, 1]
    assert found.conditions["complete"] is False
    assert "1 in flight" in found.facts["cut_short"]
    assert "WARNING: cut short: stopped after" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "other"], "serves stub, and no other"),
        (["--api", "chat"], "--api chat takes no token ids: give --text too"),
        (["--plain-api"], "--plain-api cannot ask for exact tokens"),
        (["--field", "a"], "--field a: give NAME=JSON"),
        (["--field", "=1"], "--field =1: give NAME=JSON"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        (["--api-key-file", "/no/such/file"], "--api-key-file:"),
        (["--concurrency", "0"], "at least 1 user"),
        (["--rate", "-1"], "rate of arrivals is above 0"),
        (["--prefixes", "2"], "workload random takes no --prefixes"),
        (["--output", "/proc/no/run.json"], "--output:"),
        (["--output", "/"], "--output: / cannot be written"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: list[str],
    message: str,
    server: tuple[StubServer, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(server[1], *words) == cli.EXIT_USAGE
    said = capsys.readouterr().err.splitlines()
    assert message in said[-1]
    assert said[-1].startswith("python -m loadtests run: ")
    assert not any("Traceback" in line for line in said)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--slo", "ttft=3"], "ttft_ms, tpot_ms, e2e_ms"),
        (["run", "--slo", "ttft_ms=-3"], "is no limit"),
        (["run", "--devices", "0:1"], "is not such as 3:1"),
        (["run", "--failures-max", "2"], "is no share from 0 to 1"),
        (["run", "--rate", "1", "--concurrency", "1"], "not allowed with"),
        (["rum"], "did you mean run?"),
        (["run", "--request", "3"], "run takes no --request 3 (did you mean --requests?)"),
    ],
)
def test_a_flag_that_is_wrong_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == cli.EXIT_USAGE
    (said,) = capsys.readouterr().err.splitlines()
    assert message in said


def test_no_server_is_one_line_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run"]) == cli.EXIT_USAGE
    assert "--url: which server?" in capsys.readouterr().err
    assert run("http://127.0.0.1:9") == cli.EXIT_FAILED
    assert "nothing answers at http://127.0.0.1:9/v1/models" in capsys.readouterr().err
    assert run("127.0.0.1:9") == cli.EXIT_USAGE
    assert "no URL of a server" in capsys.readouterr().err
