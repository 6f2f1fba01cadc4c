"""One real cluster for all e2e tests: `headwater serve` in float32, one prefill, one decode worker.

The `ledger` fixture runs round every test: when the test is over, every book of the cluster must
come back to its baseline and agree with independent truth.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import running
from cluster.model_store import prepare_model
from tests import references
from tests.e2e.corpus import BATCHED_TOKENS, BLOCK, CASES, CONTEXT
from tests.e2e.parity.corpus import ASKS
from tests.references import Recorded
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MODEL = "SmolLM2-135M-Instruct"
START_TIMEOUT_S = 240.0
LEDGER_TIMEOUT_S = 30.0
QUEUE_MAX = 8
AT_ONCE = 4  # requests in flight that keep both engines busy, and that the queue never rejects
COMMAND = (sys.executable, "-m", "cluster.cli")
# Options of `serve`.
SMALL = (
    *("--port", "0", "--dashboard-port", "0"),
    *("--max-model-len", str(CONTEXT), "--kv-mib", "192", "--slab-mib", "256"),
    # As the plain servers', whatever this machine has.
    *("--cores-per-worker", "1"),
    *("--set", f"engine.max_num_batched_tokens={BATCHED_TOKENS}"),
    *("--set", f"engine.block_size_tokens={BLOCK}"),
    *("--set", f"limits.queue_max_requests={QUEUE_MAX}"),
    # An audit is work for an engine that a test may believe to be idle.
    *("--set", "slab.audit_share=0"),
)
COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|c89|c99|clang(\+\+)?|cpp|nvcc)(-[0-9.]+)?")


@dataclass(frozen=True)
class Cluster:
    """A running cluster and what tests ask of it."""

    endpoint: str
    state_dir: Path
    http: httpx.Client

    def status(self) -> dict[str, Any]:
        """`/headwater/status`."""
        return dict(self.http.get("/headwater/status").json())

    def ledger(self) -> list[dict[str, Any]]:
        """`/headwater/ledger`, one entry a node."""
        return list(self.http.get("/headwater/ledger").json()["nodes"])

    def worker(self, role: str) -> dict[str, Any]:
        """The one worker of a role."""
        (found,) = [w for w in self.status()["workers"] if w["role"] == role]
        return dict(found)

    def record(self, trace_id: str) -> dict[str, Any]:
        """The record of a request with one choice."""
        (found,) = self.http.get(f"/headwater/requests/{trace_id}").json()["records"]
        return dict(found)

    def event_log(self) -> list[tuple[float, str, str]]:
        """The ingress's event log."""
        return [tuple(e) for e in self.http.get("/headwater/events").json()["events"]]

    def cli(self, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a headwater command against this cluster."""
        return command(self.state_dir, *words, timeout_s=timeout_s)

    def ray_session(self) -> Path:
        """Ray's own folder: below the state folder only where that has a short path."""
        return Path(running.read(self.state_dir).logs).parent

    def is_ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.TransportError:  # nobody listens while an ingress is replaced
            return False


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared bundled model, in the cache that `serve` itself uses."""
    from cluster.config import default_cache_dir

    return Path(prepare_model(MODEL, None, default_cache_dir(), lambda _line: None).path)


@pytest.fixture(scope="session")
def cluster(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """`headwater serve`, for all tests that need no cluster of their own."""
    assert model_path.exists()
    with serving(tmp_path_factory.mktemp("state"), "--dtype", "float32") as served:
        yield served


def command(state_dir: Path, *words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a headwater command to its end."""
    return subprocess.run(
        [*COMMAND, *words, "--state-dir", str(state_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@contextlib.contextmanager
def serving(state_dir: Path, *flags: str) -> Iterator[Cluster]:
    """Run `headwater serve` with a small configuration until the block ends."""
    log = state_dir / "serve.log"
    environment = {**os.environ, "PATH": str(path_without_compilers(state_dir / "bin"))}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*COMMAND, "serve", *SMALL, *flags, "--state-dir", str(state_dir)],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        endpoint = wait_until(
            lambda: _endpoint(process, state_dir, log), timeout_s=START_TIMEOUT_S, what="serve"
        )
        with httpx.Client(base_url=endpoint, timeout=180) as http:
            yield Cluster(endpoint, state_dir, http)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=150)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


@contextlib.contextmanager
def serving_detached(state_dir: Path, *flags: str) -> Iterator[tuple[Cluster, str]]:
    """The same with `headwater serve --detach` and `stop`; also what `serve` has printed."""
    words = ("serve", "--detach", *SMALL, *flags)
    started = command(state_dir, *words, timeout_s=START_TIMEOUT_S)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        here = running.read(state_dir)
        with httpx.Client(base_url=here.endpoint, timeout=180) as http:
            yield Cluster(here.endpoint, state_dir, http), started.stdout
    finally:
        stopped = command(state_dir, "stop", timeout_s=180)
    assert (stopped.returncode, running.last(state_dir)) == (0, None)
    assert running.started_ticks(here.pid) is None


def path_without_compilers(folder: Path) -> Path:
    """A folder with links to all programs on PATH but the compilers: the product needs none."""
    folder.mkdir()
    for entry in os.environ["PATH"].split(os.pathsep):
        for program in sorted(Path(entry).glob("*")):
            if not COMPILERS.fullmatch(program.name):
                with contextlib.suppress(FileExistsError):
                    (folder / program.name).symlink_to(program)
    assert shutil.which("gcc", path=str(folder)) is None
    return folder


def _endpoint(process: subprocess.Popen[bytes], state_dir: Path, log: Path) -> str | None:
    """The endpoint once the greeting has been answered."""
    if process.poll() is not None:
        pytest.fail(f"serve ended with {process.returncode}:\n{log.read_text()[-4000:]}")
    if "Next:" not in log.read_text():
        return None
    return running.read(state_dir).endpoint


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that share the one cluster come last, so that no other cluster runs beside it.

    Cells of the whole matrix run where they are asked for by their marker: `make chaos`.
    """
    items.sort(key=_shares_the_cluster)
    if "matrix" in (config.option.markexpr or ""):
        return
    left_out = [item for item in items if item.get_closest_marker("matrix")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]


def _shares_the_cluster(item: pytest.Item) -> bool:
    """Whether the `cluster` that a test asks for is the one of the session."""
    found = getattr(item, "_fixtureinfo").name2fixturedefs.get("cluster", ())  # noqa: B009
    return bool(found) and found[-1].scope == "session"


# ---- the ledger ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def ledger(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: all books at baseline, and true."""
    yield
    if "cluster" not in request.fixturenames:
        return
    served: Cluster = request.getfixturevalue("cluster")
    wait_until(served.is_ready, timeout_s=START_TIMEOUT_S, what="workers back")
    wait_clean(served)


def wait_clean(cluster: Cluster, timeout_s: float = LEDGER_TIMEOUT_S) -> None:
    """Until everything is at its baseline; AssertionError that names what is not."""
    faults = ["not looked yet"]

    def clean() -> bool:
        faults[:] = ledger_faults(cluster)
        return not faults

    try:
        wait_until(clean, timeout_s=timeout_s, what="a clean ledger")
    except AssertionError as late:
        raise LedgerNotClean(f"after {timeout_s} s: {faults}") from late


class LedgerNotClean(AssertionError):
    """Something is held by nobody, or counted wrongly: never chance (tests/suite.py)."""


def ledger_faults(cluster: Cluster) -> list[str]:
    """Everything that is not at its baseline, in words; empty when clean."""
    status = cluster.status()
    faults = [
        f"ingress has {count} requests in stage {stage}"
        for stage, count in status["requests"]["in_flight"].items()
        if count
    ]
    if status["admission"]["in_flight"]:
        faults.append(f"admission holds {status['admission']['in_flight']}")
    faults += [
        f"router load of {load['worker']} is {load}"
        for load in status["router"]["load"]
        if load["in_flight"] or load["queued_tokens"]
    ]
    for worker in status["workers"]:
        # Counted by vLLM's scheduler and block pool, not by us.
        if worker["running"] or worker["waiting"]:
            faults.append(f"engine of {worker['id']} runs {worker['running']}")
        if worker["free_blocks"] != worker["total_blocks"]:
            faults.append(f"engine of {worker['id']} has {worker['free_blocks']} free blocks")
    for node in cluster.ledger():
        books, scan = node["books"], node["scan"]
        counts = ("free", "filling", "quarantined", "published", "leased_slots")
        if any(books[name] != scan[name] for name in counts):
            faults.append(f"books {books} differ from the slot table {scan}")
        if books["leased_slots"] or books["filling"] or books["quarantined"] or books["leases"]:
            faults.append(f"slab of {node['node']} holds {books}")
    return faults


# ---- the reference ------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def reference() -> dict[str, Recorded]:
    """Plain vLLM's recorded answers to tests/e2e/corpus.py."""
    return references.load(references.CORPUS, CASES)


@pytest.fixture(scope="session")
def parity_reference() -> dict[str, Recorded]:
    """Plain vLLM's recorded answers to tests/e2e/parity/."""
    return references.load(references.PARITY, ASKS)


class Together:
    """Run callables in threads and give their results, or the first exception."""

    def __init__(self, calls: list[Any]) -> None:
        self._results: list[Any] = [None] * len(calls)
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(i, call)) for i, call in enumerate(calls)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, call: Any) -> None:
        try:
            self._results[index] = call()
        except BaseException as error:  # noqa: BLE001
            self._errors.append(error)

    def results(self) -> list[Any]:
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return self._results
