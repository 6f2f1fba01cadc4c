"""The command on servers that run already, and flags that cannot be used."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtests.compare import measuring
from loadtests.load.cli import main
from loadtests.load.stub_server import Script, serving

WINDOW = ("--window-s", "1", "--load", "shared_prefix")


@contextmanager
def stub(script: Script) -> Iterator[str]:
    """A stub server on a loop of its own: the command runs a loop itself."""
    ready, done, found = threading.Event(), asyncio.Event(), []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with serving(script) as (_, url):
            found.append(url)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(30)
        loop.close()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "PAUSE_S", 0.0)


@pytest.mark.slow
def test_two_urls_are_compared_and_the_section_says_why_nothing_is_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, results = tmp_path / "c", tmp_path / "RESULTS.md"
    with stub(Script(cached_tokens=0)) as one, stub(Script(cached_tokens=0)) as two:
        words = ["compare", "--folder", str(folder), "--rounds", "1", *WINDOW]
        words += ["--url", one, "--url", two, "--results", str(results)]
        assert main(words) == 0
        said = capsys.readouterr()
        # What is done is not done again; a server that is not needed need not be there.
    assert main(words) == 0
    assert "turns are left" not in capsys.readouterr().err
    assert "No claim, since (f1) has 1 of at least 5 rounds" in said.out
    assert f"(f1) {one}: the server at {one}, which was running." in said.out
    assert "shared_prefix: TTFT p50" in results.read_text()
    runs = sorted(file.name for file in (folder / "runs").iterdir())
    assert runs == ["00-f1-shared_prefix.json", "00-f2-shared_prefix.json"]
    record = json.loads((folder / "runs" / runs[0]).read_text())
    assert record["conditions"]["seed"] == 1


def test_nobody_there_is_a_failure_of_that_set_up_and_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--folder", str(tmp_path / "c"), "--url", "http://127.0.0.1:1"]
    assert main(words) == 1
    said = capsys.readouterr()
    assert "(f) http://127.0.0.1:1 could not run (round 1): GET http://127.0.0.1:1/v1/" in said.out
    assert "5 turns are left" in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rounds", "0"), "--rounds and --window-s must be above 0"),
        (("--window-s", "0"), "--rounds and --window-s must be above 0"),
        (("--turns", "-1"), "--turns must not be negative"),
        (("--budgets", "0"), "--budgets are tokens, at least 1"),
    ],
)
def test_flags_that_cannot_be_used_are_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_folder_that_was_begun_otherwise_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--folder", str(tmp_path / "c"), "--url", "http://127.0.0.1:1"]
    main([*words, "--turns", "0"])
    capsys.readouterr()
    assert main([*words, "--turns", "0", "--seed", "2"]) == 2
    assert "was begun with seed 1, not 2: repeat those flags" in capsys.readouterr().err
