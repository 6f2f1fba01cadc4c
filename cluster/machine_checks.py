"""Judges a machine's facts: each check is a pure function to one finding that says what to do.

Called by the doctor command over facts from cluster/machine_facts.py. A failure is what keeps
`headwater serve` from working; a warning is what makes it slow, or may soon keep it from working.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from cluster.config import BUNDLED_MODEL, MIB, Config
from cluster.errors import ConfigError
from cluster.kv_room import check_kv_room
from cluster.local_ray import TEMP_DIR_BYTES_MAX
from cluster.machine_facts import IMPORTED, PINNED, SHM, Facts
from cluster.model_store import FLOAT_BYTES

GB = 1e9
PYTHON_MIN, PYTHON_MAX = (3, 11), (3, 13)
MACHINES = frozenset({"x86_64", "aarch64"})
# Measured with the bundled model in bfloat16, KV apart: 1.2 GB a worker, 0.27 of it weights.
BUNDLED_WEIGHTS_BYTES = int(0.27 * GB)
ENGINE_BYTES = int(0.93 * GB)
# What a worker maps besides weights, KV and slab: mostly torch's and vLLM's libraries (measured).
WORKER_MAPS_BYTES = int(3.8 * GB)
# Ingress 0.6, Ray's own processes 0.9.
REST_BYTES = int(1.5 * GB)
# Ray's object store, which carries control messages only; on disk where it does not fit.
RAY_STORE_BYTES = 128 * MIB
# The bundled model's weights while they are converted, old and new.
CONVERSION_BYTES = int(0.6 * GB)
# Against the other dtype's GEMM: below it the other has drawbacks of its own.
SLOW_TIMES = 2.0
PROMPT_TOKENS = 1000
# A prompt token's work besides GEMMs (attention, norms), as float32 FLOP; and a step's time besides
# reading weights. Fitted to the bundled model on one core of a Zen 5, where TTFT in either dtype is
# predicted within 25 %.
TOKEN_FLOP = 60e6
STEP_OVERHEAD_S = 0.006
DAY_S = 86_400.0
CLOCK_AHEAD_MAX_S = 10 * 365 * DAY_S
# deployments/agent_socket.socket_path: what it adds to the temporary folder, and its limit.
AGENT_SOCKET = "/headwater-{uid}/agent-0123456789ab.sock"
UNIX_PATH_BYTES_MAX = 100
# What cluster/local_ray adds to the temporary folder where the state folder's path is too long.
RAY_FALLBACK = "/headwater-{uid}-12345678"


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result, in one line."""

    check: str
    level: Level
    message: str


Verdict = tuple[Level, str]


def check_python(facts: Facts, _config: Config) -> Verdict:
    """The versions that the locks are made for."""
    version = ".".join(str(part) for part in facts.python)
    what = f"{facts.implementation} {version} on {facts.system} {facts.machine}"
    fits = (
        PYTHON_MIN <= facts.python[:2] <= PYTHON_MAX
        and facts.implementation == "CPython"
        and facts.system == "linux"
        and facts.machine in MACHINES
    )
    if fits:
        return Level.OK, what
    return Level.FAILURE, (
        f"{what}, but it must be CPython 3.11, 3.12 or 3.13 on Linux x86_64 or aarch64: install "
        "one, name it in HEADWATER_PYTHON and remove .venv"
    )


def check_cores(facts: Facts, config: Config) -> Verdict:
    """A core for each worker's each thread."""
    if config.ray.address is not None:
        return Level.OK, _elsewhere(config)
    wanted = config.workers.cores_wanted
    what = f"{_workers(config)} workers want {wanted}; {facts.cores:g} usable here"
    if facts.cores >= wanted:
        return Level.OK, what
    return Level.WARNING, (
        f"{what}: workers that share cores slow each other down a lot; lower --prefill-workers, "
        "--decode-workers or --cores-per-worker, or give it more cores"
    )


def check_memory(facts: Facts, config: Config) -> Verdict:
    """Workers, their KV caches, the ingress and Ray."""
    if config.ray.address is not None:
        return Level.OK, _elsewhere(config)
    wanted = _wanted_bytes(facts, config)
    what = f"about {_gb(wanted)} wanted for {_workers(config)} workers and the rest"
    advice = "lower engine.kv_cache_mib or the number of workers, or give it more memory"
    if wanted > facts.memory.total_bytes:
        return Level.FAILURE, f"{what}, {_gb(facts.memory.total_bytes)} in all: {advice}"
    limit, maps = facts.address_space_bytes, _mapped_bytes(facts, config)
    if limit is not None and limit < maps:
        return Level.FAILURE, (
            f"one process may map {_gb(limit)} (ulimit -v), a worker maps about {_gb(maps)}: "
            "ulimit -v unlimited"
        )
    free = facts.memory.available_bytes
    if wanted > free and facts.running is None:
        return Level.WARNING, f"{what}, only {_gb(free)} free now: end something else, or {advice}"
    return Level.OK, f"{what}; {_gb(free)} free of {_gb(facts.memory.total_bytes)}"


def check_slab(facts: Facts, config: Config) -> Verdict:
    """The slab is a memfd: memory, not /dev/shm. Ray's store is in /dev/shm."""
    if config.ray.address is not None:
        return Level.OK, _elsewhere(config)
    if facts.memfd_problem is not None:
        return Level.FAILURE, (
            f"no memfd of {config.slab.mib} MiB can be made ({facts.memfd_problem}): lower "
            "slab.mib, or let the sandbox allow memfd_create"
        )
    slab = config.slab.mib * MIB
    wanted = slab + _wanted_bytes(facts, config)
    if wanted > facts.memory.total_bytes:
        return Level.FAILURE, (
            f"slab.mib {config.slab.mib} and the workers want {_gb(wanted)}, "
            f"{_gb(facts.memory.total_bytes)} in all: lower slab.mib"
        )
    if wanted > facts.memory.available_bytes and facts.running is None:
        return Level.WARNING, (
            f"slab.mib {config.slab.mib} will not fit beside the workers into "
            f"{_gb(facts.memory.available_bytes)} free now: lower slab.mib, or end something else"
        )
    if facts.shm_free_bytes is None or facts.shm_free_bytes < RAY_STORE_BYTES:
        free = "is missing" if facts.shm_free_bytes is None else f"has {_mib(facts.shm_free_bytes)}"
        return Level.WARNING, (
            f"{SHM} {free}, Ray would use a disk instead: give it {_mib(RAY_STORE_BYTES)} "
            "(docker run --shm-size=256m)"
        )
    return Level.OK, f"slab.mib {config.slab.mib} fits"


def check_http_port(facts: Facts, config: Config) -> Verdict:
    """The endpoint's port."""
    host, port = config.http.host, config.http.port
    if facts.running is not None and facts.running.endpoint.endswith(f":{port}"):
        return Level.OK, f"{host}:{port} is the running Headwater's"
    if facts.http_port_problem is None:
        return Level.OK, f"{host}:{port} is free" if port else "any free one"
    return Level.FAILURE, (
        f"cannot listen on {host}:{port} ({facts.http_port_problem}): choose another with --port, "
        "or --port 0 for any free one"
    )


def check_dashboard_port(facts: Facts, config: Config) -> Verdict:
    """The port of the dashboard of a cluster that is started here."""
    host, port = config.ray.dashboard_host, config.ray.dashboard_port
    if config.ray.address is not None:
        return Level.OK, _elsewhere(config)
    if facts.running is not None and (facts.running.dashboard or "").endswith(f":{port}"):
        return Level.OK, f"{host}:{port} is the running Headwater's"
    if facts.dashboard_port_problem is None:
        return Level.OK, f"{host}:{port} is free" if port else "any free one"
    return Level.FAILURE, (
        f"cannot listen on {host}:{port} ({facts.dashboard_port_problem}): choose another with "
        "--dashboard-port, or --dashboard-port 0 for any free one"
    )


def check_versions(facts: Facts, _config: Config) -> Verdict:
    """The pins of the lock; a local part such as +cpu is another build of the same version."""
    if facts.build not in PINNED:
        return Level.FAILURE, f"HEADWATER_BUILD is {facts.build!r}: set it to cpu or gpu"
    if not facts.pins:
        return Level.WARNING, "no lock beside the code, so versions are not known to fit"
    wrong = [
        f"{name} is {version or 'missing'}, the lock has {facts.pins.get(name)}"
        for name, version in facts.installed.items()
        if version is None or version.partition("+")[0] != facts.pins.get(name)
    ]
    if wrong:
        again = "remove .venv, and ./headwater serve installs the lock anew"
        return Level.FAILURE, f"{'; '.join(wrong)}: {again}"
    return Level.OK, ", ".join(f"{name} {version}" for name, version in facts.installed.items())


def check_imports(facts: Facts, _config: Config) -> Verdict:
    """Whether the engine's packages load; serve would tell so half a minute later."""
    if facts.import_problem is None:
        return Level.OK, f"nothing keeps {', '.join(IMPORTED)} from loading"
    return Level.FAILURE, (
        f"cannot import {facts.import_problem}: take what is in its place out of PYTHONPATH, or "
        "remove .venv, and ./headwater serve installs the lock anew"
    )


def check_packages(facts: Facts, _config: Config) -> Verdict:
    """Our packages' names; PyPI has a `router` and a `cluster` too."""
    strangers = [
        f"{name} is {folder or 'found nowhere'}"
        for name, folder in facts.package_folders.items()
        if folder != facts.root / name
    ]
    if not strangers:
        return Level.OK, f"{', '.join(facts.package_folders)} are those of {facts.root}"
    return Level.FAILURE, (
        f"{'; '.join(strangers)}, not of {facts.root}: start it by ./headwater, take the other one "
        "out of PYTHONPATH, or uninstall it (pip uninstall)"
    )


def check_libraries(facts: Facts, _config: Config) -> Verdict:
    """What vLLM's CPU build takes from the system."""
    if facts.build != "cpu":
        return Level.OK, "the GPU build needs neither libnuma nor lscpu"
    present = {"libnuma.so.1": facts.has_libnuma, "lscpu": facts.has_lscpu}
    missing = [name for name, there in present.items() if not there]
    if not missing:
        return Level.OK, "libnuma.so.1 and lscpu are there"
    packages = {"libnuma.so.1": "libnuma1", "lscpu": "util-linux"}
    install = " ".join(packages[name] for name in missing)
    return Level.FAILURE, (
        f"vLLM needs {' and '.join(missing)}: apt-get install {install} "
        "(Fedora: numactl-libs, util-linux)"
    )


def check_model(facts: Facts, config: Config) -> Verdict:
    """There, or to be made or fetched; and one request of full length fits into the KV cache."""
    name, model = config.model.path_or_name, facts.model
    if model.problem is not None:
        return Level.FAILURE, (
            f"{model.problem}: give --model a folder, a hub name or {BUNDLED_MODEL}; a missing "
            "package comes back when .venv is removed"
        )
    try:
        check_kv_room(config, model.figures)
    except ConfigError as error:
        return Level.FAILURE, str(error)
    if model.is_here:
        return Level.OK, f"{name} is ready"
    if name != BUNDLED_MODEL:
        return Level.WARNING, f"{name} will be fetched from the hub: the first start needs network"
    if model.cache_free_bytes < CONVERSION_BYTES:
        return Level.FAILURE, (
            f"{_mib(model.cache_free_bytes)} of disk are free in {config.state.cache_dir}, the "
            f"model's preparation needs {_mib(CONVERSION_BYTES)}: free some, or give --cache-dir"
        )
    return Level.OK, f"{name} will be prepared at the first start"


def check_speed(facts: Facts, config: Config) -> Verdict:
    """What a core computes in the dtype, and so about how fast answers come."""
    if config.ray.address is not None:
        return Level.OK, _elsewhere(config)
    speed, dtype = facts.speed, config.model.resolved_dtype
    if facts.build != "cpu" or speed is None or dtype not in speed.gflops:
        return Level.OK, f"{dtype} on this machine was not measured"
    what = (
        f"{dtype} computes {speed.gflops[dtype]:.0f} GFLOP/s on a core{_predicted(facts, config)}"
    )
    best = max(speed.gflops, key=lambda name: speed.gflops[name])
    times = speed.gflops[best] / speed.gflops[dtype]
    if times < SLOW_TIMES:
        return Level.OK, what
    return Level.WARNING, (
        f"{what}; {best} computes {speed.gflops[best]:.0f}: prompts take up to {times:.1f} times "
        f"as long as with --dtype {best}"
    )


def _predicted(facts: Facts, config: Config) -> str:
    """TTFT of a prompt and tokens/s of one stream, roughly; nothing while the model is not here."""
    speed, work, dtype = facts.speed, facts.model.work, config.model.resolved_dtype
    if speed is None or work is None:
        return ""
    workers = config.workers
    token_s = work.token_flop / (speed.gflops[dtype] * 1e9) + TOKEN_FLOP / (
        speed.gflops["float32"] * 1e9
    )
    ttft_s = PROMPT_TOKENS * token_s / workers.cores_of(workers.prefill)
    step_s = STEP_OVERHEAD_S + work.step_numbers * FLOAT_BYTES[dtype] / (
        speed.gbytes[dtype] * 1e9 * workers.cores_of(workers.decode)
    )
    return (
        f": about {ttft_s:.1f} s to the first token after {PROMPT_TOKENS:,} "
        f"tokens of prompt, {1 / step_s:.0f} tokens/s a stream"
    )


def check_clock(facts: Facts, _config: Config) -> Verdict:
    """Leases run on the monotonic clock; a wrong wall clock breaks TLS and misdates records."""
    behind_s = facts.code_s - facts.now_s
    advice = "set it (timedatectl set-ntp true)"
    if behind_s > DAY_S:
        return Level.WARNING, (
            f"the clock is {behind_s / DAY_S:.0f} days behind our own files: {advice}"
        )
    if -behind_s > CLOCK_AHEAD_MAX_S:
        years = -behind_s / DAY_S / 365
        return Level.WARNING, f"the clock is {years:.0f} years ahead of our own files: {advice}"
    return Level.OK, "not behind our own files, and not far ahead"


def check_state_dir(facts: Facts, _config: Config) -> Verdict:
    """Writable; and short enough for Ray's sockets, or they go to the temporary folder."""
    folder = facts.state_dir
    if folder.problem is not None:
        return Level.FAILURE, f"cannot write ({folder.problem}): give a folder with --state-dir"
    if _path_bytes(folder.path / "ray") > TEMP_DIR_BYTES_MAX:
        return Level.WARNING, (
            f"{folder.path} is too long for Ray's sockets, so Ray's files go to "
            f"{facts.temp_dir.path}: give a --state-dir of at most "
            f"{TEMP_DIR_BYTES_MAX - len('/ray')} bytes to have them together"
        )
    return Level.OK, f"{folder.path} can be written"


def check_temp_dir(facts: Facts, _config: Config) -> Verdict:
    """The agent's socket lies there, and Ray's where the state folder's path is too long."""
    folder = facts.temp_dir
    if folder.problem is not None:
        return Level.FAILURE, f"cannot write ({folder.problem}): set TMPDIR to a folder of yours"
    here = _path_bytes(folder.path)
    ray_is_here = _path_bytes(facts.state_dir.path / "ray") > TEMP_DIR_BYTES_MAX
    too_long = here + len(AGENT_SOCKET.format(uid=facts.uid)) > UNIX_PATH_BYTES_MAX or (
        ray_is_here and here + len(RAY_FALLBACK.format(uid=facts.uid)) > TEMP_DIR_BYTES_MAX
    )
    if too_long:
        return Level.FAILURE, f"{folder.path} is too long for sockets: set TMPDIR=/tmp"
    return Level.OK, f"{folder.path} can be written"


def check_socket_folder(facts: Facts, _config: Config) -> Verdict:
    """The agent's socket lies there: whoever could write to it could take the agent's place."""
    folder = facts.socket_folder
    if folder.problem is not None:
        return Level.FAILURE, (
            f"{folder.problem}, but it must be this user's alone (mode 700): remove it, or set "
            "TMPDIR to a folder of yours"
        )
    return Level.OK, f"{folder.path} is this user's alone, or will be"


IMPORTS, SPEED = "imports", "speed"
CHECKS: tuple[tuple[str, Callable[[Facts, Config], Verdict]], ...] = (
    ("Python", check_python),
    ("versions", check_versions),
    ("packages", check_packages),
    (IMPORTS, check_imports),
    ("libraries", check_libraries),
    ("cores", check_cores),
    ("memory", check_memory),
    ("slab", check_slab),
    ("HTTP port", check_http_port),
    ("dashboard port", check_dashboard_port),
    ("model", check_model),
    (SPEED, check_speed),
    ("state folder", check_state_dir),
    ("temporary folder", check_temp_dir),
    ("socket folder", check_socket_folder),
    ("clock", check_clock),
)


def judge(facts: Facts, config: Config) -> list[Finding]:
    """All checks, in order."""
    return [Finding(name, *check(facts, config)) for name, check in CHECKS]


def _workers(config: Config) -> int:
    return config.workers.prefill.most + config.workers.decode.most


def _wanted_bytes(facts: Facts, config: Config) -> int:
    """Memory without the slab. Weights are taken to lie on disk in two bytes each."""
    ranks = config.workers.tensor_parallel_size
    processes = ranks + (ranks > 1)  # the ranks, and the engine that leads them
    kv_bytes = config.engine.kv_cache_bytes
    each = processes * ENGINE_BYTES + _weights_bytes(facts, config) + kv_bytes
    return _workers(config) * each + REST_BYTES


def _mapped_bytes(facts: Facts, config: Config) -> int:
    """Address space of one worker: the slab is mapped whole."""
    kv_and_slab = config.engine.kv_cache_bytes + config.slab.mib * MIB
    return WORKER_MAPS_BYTES + _weights_bytes(facts, config) + kv_and_slab


def _weights_bytes(facts: Facts, config: Config) -> int:
    stored = facts.model.weights_bytes or BUNDLED_WEIGHTS_BYTES
    return stored * FLOAT_BYTES[config.model.resolved_dtype] // FLOAT_BYTES["bfloat16"]


def _elsewhere(config: Config) -> str:
    return f"a matter of the cluster at {config.ray.address}: run doctor on its nodes"


def _path_bytes(path: os.PathLike[str]) -> int:
    return len(os.fsencode(path))


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / GB:.1f} GB"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / MIB:.0f} MiB"
