"""`headwater profile` and `plan --validate` over real HTTP, against a server with known delays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster import cli
from loadtests.load.stub_server import MODEL, Fault, Script, serving
from loadtests.planner.profile import Profile
from tests.unit.loadtests.planner.laws import profile


async def run(*words: str) -> int:
    return await asyncio.to_thread(cli.main, [*words])


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with serving(Script(first_s=0.01, gap_s=0.002)) as (_, address):
        yield address


async def test_a_plain_server_is_profiled_by_what_http_shows(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "p.json"
    flags = ("--quick", "--url", url, "--state-dir", str(tmp_path), "--out", str(out))
    assert await run("profile", *flags) == 0
    told = capsys.readouterr().out
    assert "fit error" in told and "not told apart from its prefill" in told and str(out) in told
    found = Profile.read(out)
    assert (found.model, found.colocated, found.handover) == (MODEL, True, ())
    # The stub's first token takes 10 ms whatever the prompt, and a busy machine more.
    assert all(point.ms >= 9 for point in found.prefill)
    assert all(point.ms > 0 and point.n >= 4 for point in found.steps)
    assert found.conditions["url"] == url
    assert found.conditions["rounds"] == 1


async def test_machines_get_the_whole_profile(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--quick", "--json", "--url", url, "--state-dir", str(tmp_path))
    assert await run("profile", *flags) == 0
    assert json.loads(capsys.readouterr().out)["model"] == MODEL
    assert (tmp_path / "profile.json").exists()


async def test_a_server_that_fails_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(Script(faults=(Fault.BUSY,))) as (_, url):
        assert await run("profile", "--quick", "--url", url, "--state-dir", str(tmp_path)) == 1
    told = capsys.readouterr().err
    assert "429" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--url", "nonsense"), "no URL"),
        (("--url", "http://127.0.0.1:9"), "cannot be reached"),
        ((), "nothing runs here"),
        (("--rounds", "0", "--url", "http://127.0.0.1:9"), "at least 1"),
    ],
)
def test_what_cannot_be_profiled_is_one_line(
    words: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", *words, "--state-dir", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert named in told and told.count("\n") == 1


async def test_a_validation_stores_its_error_and_later_answers_print_it(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A profile of another machine: its predictions cannot hold here, and that must show.
    path = tmp_path / "profile.json"
    profile(model=MODEL, colocated=True, handover=()).save(path)
    load = ("--rate", "8", "--input-tokens", "64", "--output-tokens", "8")
    window = ("--warmup-s", "0.2", "--duration-s", "1.5")
    state = ("--state-dir", str(tmp_path))
    assert await run("plan", "--validate", "--url", url, *load, *window, *state) == 0
    told = capsys.readouterr().out
    assert "TTFT p50, ms" in told and "DO NOT TRUST" in told
    (stored,) = Profile.read(path).validations
    assert stored.n > 0 and abs(stored.worst.error) > 0.1
    assert await run("plan", *load, *state) == 0
    assert "DO NOT TRUST" in capsys.readouterr().out


async def test_a_profile_of_another_model_is_not_validated(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile(model="other").save(tmp_path / "profile.json")
    assert await run("plan", "--validate", "--url", url, "--state-dir", str(tmp_path)) == 1
    assert "the profile is of other" in capsys.readouterr().err
