"""`headwater status`: what it shows, to whom, and how its live form begins and ends."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster import cli
from cluster.status_view import Snapshot, draw, scaling_line
from tests.terminal import CTRL_C, terminal
from tests.unit.cluster import fake_endpoint
from tests.unit.cluster.fake_endpoint import Endpoint
from tests.unit.cluster.status_examples import (
    HELD,
    NODE,
    node,
    serve,
    status,
    unlinked,
    worker,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.chdir(tmp_path)
    with fake_endpoint.endpoint() as found:
        serve(found, tmp_path)
        yield found


def run(state_dir: Path, *flags: str) -> int:
    return cli.main(["status", "--state-dir", str(state_dir), *flags])


def drawn(*nodes: dict[str, Any], leases: bool = False, **changes: Any) -> list[str]:
    """Lines of a pipe."""
    out = io.StringIO()
    shot = Snapshot("http://x", status(**changes), nodes)
    Console(file=out, width=1 << 16).print(draw(shot, leases=leases))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def row_of(lines: list[str], name: str) -> list[str]:
    (found,) = [line.split() for line in lines if line.startswith(name)]
    return found


# ---- what is drawn ----------------------------------------------------------------------------


def test_audits_have_a_line_where_they_are_on_or_there_were_some() -> None:
    outcomes = {"agreed": 12, "tied": 1, "disagreed": 0, "unfinished": 2}
    told = "1 % of requests): 12 agreed, 1 tied, 0 disagreed, 2 unfinished."
    on = drawn(audits={"share": 0.01, "outcomes": outcomes})
    assert [line for line in on if line.startswith("Audits")] == [f"Audits of reused KV ({told}"]
    nothing = dict.fromkeys(outcomes, 0)
    assert any("Audits" in line for line in drawn(audits={"share": 0.01, "outcomes": nothing}))
    assert any("Audits" in line for line in drawn(audits={"share": 0.0, "outcomes": outcomes}))
    assert not any("Audits" in line for line in drawn(audits={"share": 0.0, "outcomes": nothing}))


def test_what_the_autoscaler_decided_last_has_a_line_with_its_reason_and_the_last_change() -> None:
    note = {
        "role": "decode",
        "replicas": 3,
        "replicas_min": 1,
        "replicas_max": 4,
        "action": "holds",
        "why": "TPOT 0.1 of 0.2 s",
        "at_s": 100.0,
        "last_change": None,
    }
    base = "Autoscaling decode: 3, of 1 to 4; holds: TPOT 0.1 of 0.2 s."
    assert scaling_line(note) == base
    change = {"before": 2, "after": 3, "why": "TPOT 0.3 of 0.2 s", "at_s": 60.0}
    told = scaling_line(note | {"last_change": change})
    assert told == f"{base} 40 s before, 2 to 3 (TPOT 0.3 of 0.2 s)."
    assert base in drawn(scaling=[note])


def test_each_worker_has_a_row_with_its_figures() -> None:
    lines = drawn(node())
    assert lines[0] == "m at http://x/v1 (ingress-1)"
    assert row_of(lines, "WORKER")[:4] == ["WORKER", "ROLE", "STATE", "PID"]
    figures = ["4711", "2", "5", "777", "120/135", "31", "17", "25", "%"]
    assert row_of(lines, "decode-1") == ["decode-1", "decode", "ready", *figures]
    assert row_of(lines, "prefill-1")[1] == "prefill"


def test_a_worker_that_is_not_linked_has_dashes_for_figures() -> None:
    lines = drawn(workers=[unlinked("decode-2", "decode", "connecting")])
    assert row_of(lines, "decode-2") == ["decode-2", "decode", "connecting", "4711", *["-"] * 7]


def test_a_worker_without_prompts_has_no_share() -> None:
    lines = drawn(workers=[worker("decode-2", "decode", prompt_tokens_total=0)])
    assert row_of(lines, "decode-2")[-1] == "-"


def test_a_slab_has_a_row_and_its_leases_on_demand() -> None:
    lines = drawn(node())
    assert row_of(lines, NODE[:8]) == [NODE[:8], "182", "170", "11", "1", "0", "3", "1"]
    assert not any("load-7" in line for line in lines)
    told = "\n".join(drawn(node(), leases=True))
    assert f"Slab of node {NODE[:8]}: 1 lease, 1 put off, 1 owner filling slots." in told
    assert "lease load-9 of decode-2: waits for some of 5 blocks, 0.1 s old, ends in 0.9" in told
    assert "lease load-7 of decode-1: 3 blocks, 1.2 s old, ends in 28.8 s" in told
    assert "1 slots filling by prefill-1, 0.5 s old, ends in 59.5 s" in told


def test_a_hand_off_tells_what_is_to_come_and_a_quarantine_what_ends_it() -> None:
    books = node()["books"]
    books["leases"] = [{**books["leases"][0], "handoff": True, "awaited": 2}]
    books["fills"] = [{**books["fills"][0], "state": "quarantined", "expires_in_s": -3.0}]
    told = "\n".join(drawn(node(books=books), leases=True))
    assert "hand-off load-7 of decode-1: 3 blocks and 2 to come, 1.2 s old" in told
    assert "1 slots quarantined by prefill-1, 0.5 s old, until their writer has stopped" in told


def test_the_ledger_shows_what_workers_and_the_ingress_hold_with_owners_and_ages(
    server: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--ledger") == 0
    told = capsys.readouterr().out.splitlines()
    for line in (
        "Worker decode-1: 1 attempt, 1 load, 2 of 16 staging slots.",
        "  attempt cmpl-7~2 of ingress-1: running, 3.0 s old",
        "  load for cmpl-8~1 under load-8: 9 blocks, aborted, 0.2 s old",
        "  2 staging slots quarantined by 10.0.0.2:7, 40.0 s old",
        "Worker prefill-1: its link ended",
        "Ingress: 2 requests.",
        "  request cmpl-7: decode at decode-1, 4.0 s old",
        "  request cmpl-9: parked, 1.0 s old, hand-off cmpl-9~1 open",
    ):
        assert line in told


def test_without_its_flag_nobody_is_asked_what_it_holds(
    server: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 0
    assert "Ingress:" not in capsys.readouterr().out


def test_a_node_whose_agent_is_silent_is_told_in_its_row() -> None:
    lines = drawn({"node": NODE, "error": "the node's agent is silent for 5 s"}, leases=True)
    assert f"{NODE[:8]}: the node's agent is silent for 5 s" in lines
    assert f"Slab of node {NODE[:8]}: the node's agent is silent for 5 s" in lines


def test_requests_queue_cache_and_directory_have_a_line_each() -> None:
    told = "\n".join(drawn(node()))
    assert "Requests now: 1 prefill, 3 decode. Ended: 12 finished, 1 cancelled" in told
    assert "Queue: 4 of 40 places taken (32 are engine slots). 6 of the rejected" in told
    assert "Cached: 25 % of 400 prompt tokens; in the last minute - of 0." in told
    assert "Hand-overs 9, resumes 2, role fallbacks 0." in told
    assert f"Directory: heard 0.3 s ago; slab:{NODE[:8]} 44 blocks exact, engine:decode-1" in told
    assert "; digests 31 equal, 1 different; out of sync since the start: " in told
    assert ": 1 differing digest, 2 missing events." in told


def test_stream_out_of_sync_is_shown_with_its_reason() -> None:
    source = {"source": "engine:d1", "blocks": 8, "freshness": "degraded", "reason": "digest"}
    known = status()["directory"] | {"sources": [source], "degraded_total": {}}
    told = "\n".join(drawn(directory=known))
    assert "engine:d1 8 blocks degraded (digest); digests 31 equal" in told
    assert "never out of sync." in told


def test_streams_that_were_joined_late_are_no_trouble() -> None:
    known = status()["directory"] | {"degraded_total": {"unknown_source": 2}}
    told = "\n".join(drawn(directory=known))
    assert "unknown_source" not in told
    assert "never out of sync." in told


def test_queue_that_rejected_nothing_does_not_mention_it() -> None:
    told = "\n".join(drawn(admission=status()["admission"] | {"refused_total": 0}))
    assert "Queue: 4 of 40 places taken (32 are engine slots).\n" in told
    assert "0 rejected, 0 failed." in told


def test_a_directory_that_is_not_heard_and_degradations_are_told() -> None:
    told = "\n".join(
        drawn(
            directory=status()["directory"] | {"heard_age_s": None, "sources": []},
            degraded=["it rains", "it pours"],
        )
    )
    assert "Directory: not heard from; no blocks yet; digests" in told
    assert "Degraded: it rains" in told and "Degraded: it pours" in told


def test_no_worker_yet_is_said() -> None:
    assert "No worker yet." in drawn(workers=[])


# ---- once -------------------------------------------------------------------------------------


def test_a_pipe_gets_it_once_in_whole_lines_without_colours(
    server: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "decode-" + "x" * 300
    server.objects["/headwater/status"] = status(workers=[worker(name, "decode")])
    assert run(tmp_path) == 0
    shown = capsys.readouterr().out
    assert name in shown
    assert shown.count("WORKER") == 1
    assert "\x1b" not in shown


def test_machines_get_names_figures_and_shares(
    server: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workers"][0]["id"] == "decode-1"
    assert found["workers"][0]["blocks_published_total"] == 31
    assert found["workers"][0]["cached_share"] == 0.25
    assert found["cache"]["total"]["cached_share"] == 0.25
    assert found["admission"]["in_flight"] == 4
    (slab,) = found["nodes"]
    assert (slab["node"], slab["slots_total"], slab["leases"]) == (NODE, 182, 1)
    assert "ledger" not in found


def test_the_ledger_for_machines_has_every_lease_and_the_scan(
    server: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--json", "--ledger") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["held"] == HELD
    (one,) = found["ledger"]
    assert one["books"]["leases"][0]["key"] == "load-7"
    assert one["scan"] == {"free": 170}


def test_nothing_running_is_told_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "none") == 1
    assert "./headwater serve" in capsys.readouterr().err


def test_an_endpoint_that_does_not_answer_yet_is_told(
    server: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del server.objects["/headwater/status"]
    assert run(tmp_path) == 1
    assert "It may still be starting" in capsys.readouterr().err


def test_an_endpoint_that_is_not_headwater_is_told(
    server: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.objects["/headwater/status"] = {"status": "fine"}
    assert run(tmp_path) == 1
    assert "is it Headwater?" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "soon"])
def test_an_interval_that_is_none_is_refused(
    interval: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        run(tmp_path, f"--interval={interval}")
    assert refused.value.code == 2
    assert "--interval" in capsys.readouterr().err


# ---- live -------------------------------------------------------------------------------------


def command(state_dir: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "cluster.cli", "status", "--state-dir", str(state_dir), *flags]


def test_on_a_terminal_it_refreshes_survives_the_endpoint_and_ends_on_ctrl_c(
    server: Endpoint, tmp_path: Path
) -> None:
    with terminal(command(tmp_path, "--interval", "0.1"), ROOT) as screen:
        screen.read_until(lambda shown: shown.count("WORKER") >= 2)
        answers = server.objects.pop("/headwater/status")
        screen.read_until(lambda shown: "What follows is old" in shown)
        assert "404 nothing here" in screen.shown
        server.objects["/headwater/status"] = {**answers, "degraded": ["it came back"]}
        screen.read_until(lambda shown: "it came back" in shown)
        screen.press(CTRL_C)
        assert screen.ended() == 0
    assert "Traceback" not in screen.shown
    assert screen.shown.rindex("\x1b[?25h") > screen.shown.rindex("\x1b[?25l")  # the cursor is back
    assert screen.shown.rindex("\n") > screen.shown.rindex("Directory:")


def test_once_on_a_terminal_ends_by_itself(server: Endpoint, tmp_path: Path) -> None:
    with terminal(command(tmp_path, "--once"), ROOT) as screen:
        assert screen.ended() == 0
    assert screen.shown.count("WORKER") == 1
    assert "\x1b[?25l" not in screen.shown


def test_a_terminal_that_cannot_move_its_cursor_gets_it_once(
    server: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(["env", "TERM=dumb", *command(tmp_path)], ROOT) as screen:
        assert screen.ended() == 0
    assert screen.shown.count("WORKER") == 1
