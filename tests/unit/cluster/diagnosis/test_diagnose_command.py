"""`headwater diagnose` against an endpoint that answers as scripted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster import cli
from cluster.commands.diagnose import LEDGER_PATH, STATUS_PATH, watch
from cluster.diagnosis.drawing import as_json, lines
from cluster.diagnosis.judge import NOTHING, judge
from cluster.diagnosis.rules import Cause
from tests.unit.cluster import status_examples
from tests.unit.cluster.diagnosis.made_up import decode, flow, status, window, worker_status
from tests.unit.cluster.fake_endpoint import Endpoint


class Time:
    """A clock that moves only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def scripted(server: Endpoint) -> None:
    server.objects |= {
        STATUS_PATH: status(worker_status("decode-1", "decode")),
        LEDGER_PATH: {"nodes": []},
    }


def test_it_looks_over_the_whole_window_and_at_the_slabs_at_both_ends(server: Endpoint) -> None:
    scripted(server)
    time = Time()
    looks = watch(server.url, 2.0, interval_s=0.5, clock=time.clock, sleep=time.sleep)
    assert [look.at_s - 100.0 for look in looks] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert [look.nodes for look in looks] == [[], None, None, None, []]


def test_without_a_running_cluster_one_line_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["diagnose", "--state-dir", str(tmp_path)]) != 0
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "./headwater serve" in told


def test_an_endpoint_of_another_version_gets_one_line(
    server: Endpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status_examples.serve(server, tmp_path)
    monkeypatch.setattr("cluster.commands.diagnose.watch", lambda url, _: short_watch(url))
    assert cli.main(["diagnose", "--state-dir", str(tmp_path)]) != 0
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "another version" in told


def short_watch(url: str) -> object:
    time = Time()
    return watch(url, 2.0, clock=time.clock, sleep=time.sleep)


@pytest.mark.parametrize("words", ["0", "1.9", "1e9", "nan", "soon"])
def test_a_window_that_makes_no_sense_is_refused(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["diagnose", "--seconds", words])
    assert "--seconds" in capsys.readouterr().err


def test_for_machines_it_prints_one_object(
    server: Endpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status_examples.serve(server, tmp_path)
    scripted(server)
    monkeypatch.setattr("cluster.commands.diagnose.watch", lambda url, _: short_watch(url))
    assert cli.main(["diagnose", "--json", "--state-dir", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "not enough evidence"  # its one worker says nothing new
    assert any("decode-1 said nothing new" in words for words in found["missing"])


def test_the_text_names_the_cause_its_evidence_and_each_setting() -> None:
    seen = window(decode(decode_share=0.94, running=14.0), flow=flow(decode=14.0))
    found = judge(seen)
    told = "\n".join(lines(found, seen, model="m", endpoint="http://here"))
    assert "Binds: decode bandwidth (high confidence: 94 % of the window)." in told
    assert found.finding is not None
    for evidence in found.finding.evidence:
        assert f"  {evidence}" in told
    for setting in found.finding.settings:
        assert setting.key in told
    assert "Next candidate:" in told


def test_the_text_says_what_was_not_seen_and_what_works_less_well() -> None:
    seen = window(missing=("decode worker d2 is stalled: x",), degraded=("no directory",))
    told = "\n".join(lines(judge(seen), seen, model="m", endpoint="http://here"))
    assert "Nothing binds (low confidence): idle" in told
    assert "Not seen:\n  decode worker d2 is stalled: x" in told
    assert "Degraded:\n  no directory" in told


def test_the_object_holds_verdict_scores_and_figures() -> None:
    seen = window()
    found = json.loads(json.dumps(as_json(judge(seen), seen)))
    assert found["verdict"] == NOTHING
    assert found["scores"].keys() == {str(cause) for cause in Cause}
    assert found["window"]["flow"]["looks"] == 21
