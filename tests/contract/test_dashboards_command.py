"""`headwater dashboards` with the real grafana-client, against an HTTP server that keeps state.

No Grafana can be had here: the server is tests/contract/grafana_server. The command runs in the
environment that the launcher makes for it, beside the one that the tests run in.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.grafana_server import TOKEN, GrafanaState, serving

pytestmark = [pytest.mark.contract, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "helm" / "dashboards"
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def python() -> Path:
    """Of the environment with grafana-client."""
    named = os.environ.get("HEADWATER_GRAFANA_PYTHON")
    found = Path(named) if named else Path(f"{sys.prefix}-grafana") / "bin" / "python"
    if not found.exists():
        words = f"{found} is not there: ./headwater dashboards --help makes its environment"
        if os.environ.get("CI"):
            pytest.fail(words)
        pytest.skip(words)
    return found


@pytest.fixture
def state() -> GrafanaState:
    return GrafanaState()


@pytest.fixture
def url(state: GrafanaState) -> Iterator[str]:
    with serving(state) as address:
        yield address


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two small dashboards."""
    folder = tmp_path / "dashboards"
    folder.mkdir()
    for name in ("fleet", "slo"):
        write(folder / f"{name}.json", uid=f"headwater-{name}", title=name, panels=[])
    return folder


def write(path: Path, **body: object) -> None:
    path.write_text(json.dumps(body))


@pytest.fixture
def command(python: Path, url: str, tmp_path: Path, files: Path) -> Command:
    """Runs it: against our server, on our files, with the right token, unless told otherwise."""
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "GRAFANA_TOKEN")
    environment = {key: value for key, value in os.environ.items() if key not in proxies}

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        flags = {"--url": url, "--token-file": str(token), "--dir": str(files), **more}
        listed = [part for flag, value in flags.items() if value for part in (flag, value)]
        return subprocess.run(
            [str(python), "-P", "-m", "cluster.cli", "dashboards", *words, *listed],
            env={**environment, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


def said(done: subprocess.CompletedProcess[str], code: int = 0) -> list[str]:
    assert (done.returncode, done.stderr) == (code, "")
    return done.stdout.splitlines()


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line, which says these."""
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("headwater: ") and done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr
    assert TOKEN not in done.stderr


def test_the_shipped_dashboards_go_there_once_and_come_back_the_same(
    command: Command, state: GrafanaState, tmp_path: Path
) -> None:
    names = sorted(path.name for path in SHIPPED.glob("*.json"))
    pushed = said(command("push", **{"--dir": str(SHIPPED)}))
    assert pushed == ["made the folder", *(f"{name}: new" for name in names)]
    assert len(state.dashboards) == 4
    assert set(state.folder_of.values()) == {"headwater"}
    assert state.folders["headwater"]["title"] == "Headwater"
    assert any(agent.startswith("grafana-client/") for agent in state.agents)
    assert said(command("push", **{"--dir": str(SHIPPED)})) == [f"{n}: as it was" for n in names]
    assert len(state.saves) == 4
    assert said(command("diff", **{"--dir": str(SHIPPED)})) == []
    pulled = tmp_path / "pulled"
    assert said(command("pull", **{"--dir": str(pulled)})) == [f"{name}: new" for name in names]
    assert {p.name: p.read_text() for p in pulled.iterdir()} == {
        p.name: p.read_text() for p in SHIPPED.glob("*.json")
    }


def test_a_changed_file_is_shown_and_pushed_alone(
    command: Command, state: GrafanaState, files: Path
) -> None:
    said(command("push"))
    write(files / "slo.json", uid="headwater-slo", title="objectives", panels=[])
    shown = said(command("diff"), 1)
    assert shown[:2] == ["--- grafana/slo.json", "+++ file/slo.json"]
    assert '-  "title": "slo",' in shown and '+  "title": "objectives",' in shown
    assert said(command("push")) == ["fleet.json: as it was", "slo.json: changed"]
    assert state.dashboards["headwater-slo"]["version"] == 2
    assert state.dashboards["headwater-slo"]["title"] == "objectives"
    assert said(command("diff")) == []


def edit(state: GrafanaState, **change: Any) -> None:
    """Somebody saves the dashboard fleet in Grafana."""
    state.save({**state.dashboards["headwater-fleet"], **change}, "headwater")


def test_what_was_changed_in_grafana_is_pulled_and_new_ones_too(
    command: Command, state: GrafanaState, files: Path
) -> None:
    said(command("push"))
    edit(state, title="ours, better")
    state.save({"uid": "abc", "title": "hand-made", "panels": []}, "headwater")
    state.save({"uid": "theirs", "title": "elsewhere", "panels": []}, "")
    assert said(command("diff"), 1)[-1] == "only in Grafana: abc (pull fetches it)"
    assert said(command("pull")) == ["abc.json: new", "fleet.json: changed", "slo.json: as it was"]
    assert json.loads((files / "fleet.json").read_text())["title"] == "ours, better"
    pulled = json.loads((files / "abc.json").read_text())
    assert pulled == {"uid": "abc", "title": "hand-made", "panels": []}
    assert not (files / "theirs.json").exists()
    assert said(command("diff")) == []


def test_a_save_in_between_is_not_overwritten(
    command: Command, state: GrafanaState, files: Path
) -> None:
    said(command("push"))
    write(files / "fleet.json", uid="headwater-fleet", title="new", panels=[])
    state.between = [{**state.dashboards["headwater-fleet"], "title": "a colleague's"}]
    refused(command("push"), "'new' was changed in Grafana just now", "diff")
    assert state.dashboards["headwater-fleet"]["title"] == "a colleague's"


def test_a_title_that_is_taken_is_told(command: Command, state: GrafanaState) -> None:
    state.folders["headwater"] = {"uid": "headwater", "title": "Headwater"}
    state.save({"uid": "other", "title": "fleet"}, "headwater")
    refused(command("push"), "its title is taken")


def test_a_dashboard_that_grafana_has_not_is_shown_whole_and_left_by_pull(
    command: Command, files: Path
) -> None:
    shown = said(command("diff"), 1)
    assert shown[:2] == ["--- /dev/null", "+++ file/fleet.json"]
    before = (files / "fleet.json").read_text()
    assert said(command("pull"))[0] == "fleet.json: not in Grafana, left as it is"
    assert (files / "fleet.json").read_text() == before


def test_a_grafana_below_a_path_is_reached(
    command: Command, state: GrafanaState, files: Path
) -> None:
    with serving(state, "/sub/grafana") as address:
        assert said(command("push", **{"--url": address}))[-1] == "slo.json: new"
        assert said(command("push", **{"--url": f"{address}/"}))[-1] == "slo.json: as it was"
    assert len(state.dashboards) == len(list(files.iterdir()))


def test_without_the_right_token_the_way_to_one_is_told(command: Command, tmp_path: Path) -> None:
    refused(command("push", **{"--token-file": ""}), "(401)", "--token-file")
    wrong = tmp_path / "wrong"
    wrong.write_text("glsa_other")
    refused(command("diff", **{"--token-file": str(wrong)}), "(401)", "service account")
    wrong.write_text("two words\n")
    refused(command("diff", **{"--token-file": str(wrong)}), "one token")
    refused(command("diff", **{"--token-file": str(tmp_path / "none")}), "cannot be read")


@pytest.mark.parametrize("status", [400, 403, 404, 412, 500, 502])
def test_a_grafana_that_refuses_is_told_in_one_line(
    command: Command, state: GrafanaState, status: int
) -> None:
    said(command("push"))
    state.broken = status
    done = command("diff")
    if status == 404:  # of a dashboard, no trouble; of the search, it is
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        return
    refused(done, str(status))


def test_where_no_grafana_is_the_address_is_told(command: Command) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        refused(command("push", **{"--url": nobody}), nobody, "--url")
    refused(command("push", **{"--url": "grafana:3000"}), "http://grafana:3000")
    refused(command("push", **{"--url": "http://u:secret@h"}), "--token-file")


def test_files_that_are_no_dashboards_are_named(command: Command, files: Path) -> None:
    (files / "a.json").write_text("{")
    refused(command("push"), "a.json", "cannot be read")
    (files / "a.json").write_text("[]")
    refused(command("push"), "a.json", "uid")
    write(files / "a.json", uid="headwater-slo", title="again")
    refused(command("push"), "same uid headwater-slo")
    for path in files.iterdir():
        path.unlink()
    refused(command("push"), "no dashboards", "--dir")
