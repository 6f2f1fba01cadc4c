"""`sweep`: its steps on a modelled server, and its plumbing on a real one that answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests.load import flags
from loadtests.load.cli import build_parser, main
from loadtests.load.commands import sweep
from loadtests.load.commands.sweep import Done, judged, sweep_with
from loadtests.load.records import Chunk, Outcome, Run, Sample
from tests.unit.loadtests.load.caching_server import CachingServer

SLO = ("--slo", "ttft_ms=300", "--pause-s", "0", "--quiet")


def parsed(*words: str) -> argparse.Namespace:
    return build_parser("load", "sweep").parse_args(["sweep", *words, *SLO])


def modelled(load: float, knee: float = 5.0, **facts: object) -> Run:
    """Over 10 s: each request has its first token after 100 ms, or 900 above the knee."""
    wait_s = 0.1 if load <= knee else 0.9
    samples = tuple(
        Sample(
            index=n,
            group="",
            due_s=n / load,
            sent_s=n / load,
            ended_s=n / load + wait_s,
            outcome=Outcome.OK,
            chunks=(Chunk(n / load + wait_s, 1),),
            input_tokens=5,
            output_tokens=1,
        )
        for n in range(int(10 * load))
    )
    return Run("", {}, dict(facts), (0.0, 10.0), samples, slo={"ttft_ms": 300.0})


def steps_of(answer: Callable[[float], Run], asked: list[float]) -> Callable[[float, int], Done]:
    def step(load: float, number: int) -> Done:
        assert number == len(asked)
        asked.append(load)
        return judged(answer(load), load, 0.95)

    return step


def swept(arguments: argparse.Namespace, answer: Callable[[float], Run]) -> tuple[int, list[float]]:
    asked: list[float] = []
    code = sweep_with(arguments, sweep._search(arguments), steps_of(answer, asked))
    return code, asked


def test_a_sweep_ends_at_the_first_break_and_tells_the_knee(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, asked = swept(parsed("--rates", "8,2,4,16"), modelled)
    assert (code, asked) == (0, [2.0, 4.0, 8.0])
    out = capsys.readouterr().out
    assert "The knee is 4 requests/s: that held, 8 did not." in out
    assert "A load holds if 95% of its measured requests met ttft_ms ≤ 300." in out
    rows = [line.split() for line in out.splitlines() if line.endswith(("holds", "breaks"))]
    assert [(row[0], row[1], row[3], row[-2], row[-1]) for row in rows] == [
        ("2", "20", "100.0", "100.0%", "holds"),
        ("4", "40", "100.0", "100.0%", "holds"),
        ("8", "80", "900.0", "0.0%", "breaks"),
    ]


def test_it_can_search_between_two_loads(capsys: pytest.CaptureFixture[str]) -> None:
    code, asked = swept(parsed("--find-users", "1:32"), modelled)
    assert (code, asked) == (0, [1, 2, 4, 8, 6, 5])
    assert "The knee is 5 users: that held, 6 did not." in capsys.readouterr().out


def test_every_step_is_a_run_of_its_own(tmp_path: Path) -> None:
    swept(parsed("--rates", "4,8", "--output", str(tmp_path / "new")), modelled)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "00-rate-4.json",
        "01-rate-8.json",
    ]
    assert Run.read(tmp_path / "new" / "01-rate-8.json") == modelled(8)


def test_an_interrupt_keeps_the_steps_before_and_counts_none_that_was_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(load: float) -> Run:
        return modelled(load, interrupted=load == 4)

    arguments = parsed("--rates", "2,4,8", "--output", str(tmp_path))
    code, asked = swept(arguments, answer)
    assert (code, asked) == (130, [2.0, 4.0])
    out = capsys.readouterr().out
    assert "interrupted before 4 requests/s were measured" in out
    assert "Every load held: the knee is above 2 requests/s" in out
    assert (tmp_path / "01-rate-4.json").exists()


def test_a_step_that_was_cut_short_broke(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(load: float) -> Run:
        return modelled(load, cut_short="the deadline was reached" if load == 4 else "")

    assert swept(parsed("--rates", "2,4,5"), answer) == (0, [2.0, 4.0])
    out = capsys.readouterr().out
    assert "cut short: the deadline was reached" in out
    assert "The knee is 2 requests/s" in out


def test_a_knee_next_to_a_late_generator_is_not_to_be_relied_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def answer(load: float) -> Run:
        run = modelled(load)
        if load < 8:
            return run
        late = tuple(replace(each, due_s=each.due_s - 0.1) for each in run.samples)
        return replace(run, samples=late)

    swept(parsed("--rates", "4,8"), answer)
    out = capsys.readouterr().out
    assert "Not to be relied on at 8 requests/s: there the generator was late." in out
    swept(parsed("--rates", "4,8"), modelled)
    assert "Not to be relied on" not in capsys.readouterr().out


def test_too_few_requests_to_tell_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    swept(parsed("--rates", "0.5,4"), modelled)
    out = capsys.readouterr().out
    assert out.count("too few to tell 95% from all of them") == 1
    assert "5 measured requests are too few" in out


def test_steps_on_a_server_have_their_own_prompts_warm_up_and_window(tmp_path: Path) -> None:
    with CachingServer().serving() as server:
        code = main(
            [
                *("sweep", "--url", server.url, "--vocabulary", "49152", *SLO),
                *("--rates", "50,100", "--past-break", "--output", str(tmp_path)),
                *("--input-tokens", "40", "--output-tokens", "2"),
                *("--warmup-s", "0.1", "--duration-s", "0.2"),
            ]
        )
        prompts = server.prompts
    runs = [Run.read(path) for path in sorted(tmp_path.iterdir())]
    assert code == 0 and len(runs) == 2
    assert len(set(prompts)) == len(prompts) == sum(len(run.samples) for run in runs)
    assert [run.conditions["arrival"]["rate"] for run in runs] == [50, 100]
    assert {run.conditions["seed"] for run in runs} == {1}
    assert len({run.conditions["step_seed"] for run in runs}) == 2
    for run in runs:
        assert run.window_s[0] == 0.1
        assert run.window_s[1] == pytest.approx(0.3)
        assert (run.conditions["warmup_s"], run.conditions["duration_s"]) == (0.1, 0.2)


def test_users_that_run_out_of_requests_are_given_more_and_other_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with CachingServer().serving() as server:
        code = main(
            [
                *("sweep", "--url", server.url, "--vocabulary", "49152", *SLO),
                *("--users", "4", "--input-tokens", "10", "--output-tokens", "1"),
                *("--warmup-s", "0", "--duration-s", "0.5", "--output", str(tmp_path)),
            ]
        )
        prompts = server.prompts
    (run,) = [Run.read(path) for path in tmp_path.iterdir()]
    # The machine decides how many attempts that takes, and whether it takes more than one.
    tries = capsys.readouterr().err.count("requests were too few for 4 users") + 1
    assert code == 0 and run.conditions["step_seed"] == 10_000 + tries - 1
    assert run.window_s[1] == pytest.approx(0.5)
    assert len(set(prompts)) == len(prompts) >= len(run.samples)


def test_a_server_that_refuses_everything_has_no_knee_and_its_words_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with CachingServer(refuse=lambda _: True).serving() as server:
        code = main(
            [
                *("sweep", "--url", server.url, "--vocabulary", "49152", *SLO),
                *("--rates", "50,100", "--input-tokens", "40", "--output-tokens", "2"),
                *("--warmup-s", "0", "--duration-s", "0.3"),
            ]
        )
    assert code == 1
    out = capsys.readouterr().out
    assert "No load held: the knee is below 50 requests/s" in out
    assert "refused, request 0: " in out and "not now" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rates", "1,x"), "'1,x' is no list of loads such as 0.5,1,2"),
        (("--rates", "0,1"), "loads are above 0"),
        (("--find-rate", "5"), "'5' is not such as 0.5:8"),
        (("--find-rate", "5:1"), "from a load above 0 to a higher one"),
        (("--rates", "1", "--users", "1"), "not allowed with"),
        ((), "one of the arguments --rates --users --find-rate --find-users is required"),
        (("--users", "1.5"), "--users are whole numbers"),
        (("--find-users", "1:2.5"), "users are whole numbers"),
        (("--find-rate", "1:8", "--precision", "2"), "a precision is between 0 and 1"),
    ],
)
def test_loads_that_cannot_be_swept_are_told_in_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["sweep", "--url", "http://127.0.0.1:9", *words, *SLO])
    except SystemExit as ended:
        code = int(str(ended.code))
    error = capsys.readouterr().err
    assert code == 2 and message in error and len(error.splitlines()) == 1


def test_a_sweep_without_limits_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--url", "http://127.0.0.1:9", "--rates", "1"]) == 2
    assert "--slo: a sweep needs limits to break" in capsys.readouterr().err


def test_a_sweep_takes_no_flag_that_only_one_run_has() -> None:
    parser = argparse.ArgumentParser()
    flags.add_outcome(parser, several=True)
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert "--failures-max" not in known and "--devices" not in known and "--output" in known
