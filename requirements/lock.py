"""Resolves the input files of this folder into hashed lock files.

Called by `make lock` (never at run time). Needs `uv` on PATH or named by --uv, and `packaging`.
It must not write the address of any index into a lock, so that every installer may use its own.

Each lock is valid for CPython 3.11 to 3.13 on Linux, x86_64 and aarch64: an entry that none of
these environments needs is dropped, and a marker that is true in all of them is removed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
PYTHON_VERSIONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")

# sha256 of torch 2.13.0+cpu for CPython 3.11, 3.12 and 3.13 (manylinux_2_28). The build is not on
# PyPI, so uv cannot see it. The first was computed from the file; each of the others was found,
# equal, in at least two independent public lock files.
TORCH_CPU_SHA256 = (
    "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",  # 3.11 x86_64
    "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",  # 3.12 x86_64
    "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",  # 3.13 x86_64
    "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",  # 3.11 aarch64
    "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",  # 3.12 aarch64
    "0b8f7d0423027ae8b90c7977c627f3379f325363a08224dffad9b4b2d684a83d",  # 3.13 aarch64
)
# Only PyPI's torch, a CUDA build, asks for these. It needs them to be imported at all.
CUDA_NAMES = re.compile(r"(nvidia|cuda)-")


class LockError(Exception):
    """The inputs do not resolve to a lock that keeps this folder's promises."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One pinned requirement with the sha256 of every file that may satisfy it."""

    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    def text(self) -> str:
        lines = [str(self.requirement), *(f"    --hash=sha256:{value}" for value in self.hashes)]
        return " \\\n".join(lines) + "\n"


def compile_inputs(
    uv: str,
    source: Path,
    *,
    overrides: Path | None = None,
    constraints: Path | None = None,
    dependencies: bool = True,
) -> list[Entry]:
    """Resolves `source` with uv; raises CalledProcessError when it has no solution."""
    command = [uv, "--quiet", "pip", "compile", "--universal", "--generate-hashes"]
    command += ["--python-version", PYTHON_VERSIONS[0], "--no-header", "--no-annotate"]
    command += ["--no-emit-index-url", "--no-emit-find-links"]
    if overrides is not None:
        command += ["--override", str(overrides)]
    if constraints is not None:
        command += ["--constraint", str(constraints)]
    if not dependencies:
        command += ["--no-deps"]
    done = subprocess.run([*command, str(source)], check=True, text=True, stdout=subprocess.PIPE)
    return parse(done.stdout)


def parse(text: str) -> list[Entry]:
    """Reads a lock back. Raises LockError on a line that is neither a pin nor a hash."""
    entries: list[Entry] = []
    for logical in text.replace("\\\n", " ").splitlines():
        if not logical.strip() or logical.startswith("#"):
            continue
        head, *hashes = re.split(r"\s+--hash=sha256:", logical.strip())
        if not hashes or "==" not in head:
            message = f"not a pinned and hashed requirement: {logical!r}"
            raise LockError(message)
        entries.append(Entry(Requirement(head), tuple(sorted(value.strip() for value in hashes))))
    return entries


def environments() -> list[dict[str, str]]:
    """Marker environments that a lock is valid for."""
    return [
        {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{version}.5",
            "python_version": version,
            "sys_platform": "linux",
        }
        for version in PYTHON_VERSIONS
        for machine in MACHINES
    ]


def narrow(entries: list[Entry]) -> list[Entry]:
    """Entries needed in some environment; markers that hold in all of them are removed."""
    kept: list[Entry] = []
    for entry in entries:
        marker = entry.requirement.marker
        truths = [marker is None or marker.evaluate(where) for where in environments()]
        if all(truths) and marker is not None:
            bare = Requirement(str(entry.requirement))
            bare.marker = None
            kept.append(replace(entry, requirement=bare))
        elif any(truths):
            kept.append(entry)
    return kept


def admit_cpu_torch(entries: list[Entry]) -> list[Entry]:
    """Adds the hashes of the smaller CPU build to torch's entry."""
    return [
        replace(entry, hashes=tuple(sorted({*entry.hashes, *TORCH_CPU_SHA256})))
        if entry.name == "torch"
        else entry
        for entry in entries
    ]


def cpu_torch(entries: list[Entry]) -> Entry:
    """The CPU build alone, which the launcher tries first.

    pip prefers a file whose hash its index states over one in a folder, whatever the version, so
    that the entry with both builds' hashes would never take the CPU build from a folder.
    """
    (torch,) = (entry for entry in entries if entry.name == "torch")
    exact = Requirement(f"torch{torch.requirement.specifier}+cpu")
    return Entry(exact, tuple(sorted(TORCH_CPU_SHA256)))


def without(entries: list[Entry], present: list[Entry]) -> list[Entry]:
    """Entries that an environment with `present` still lacks."""
    names = {entry.name for entry in present}
    return [entry for entry in entries if entry.name not in names]


def dropped_names(overrides: Path) -> frozenset[str]:
    """Names that an override file removes from the resolution."""
    lines = [line.strip() for line in overrides.read_text().splitlines()]
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return frozenset(
        canonicalize_name(item.name) for item in wanted if item.marker and "never" in str(item)
    )


def write(path: Path, entries: list[Entry], source: str) -> None:
    """Writes one lock file, sorted by name."""
    header = f"# Made by `make lock` from requirements/{source}. Do not edit.\n"
    ordered = sorted(entries, key=lambda entry: (entry.name, str(entry.requirement)))
    path.write_text(header + "".join(entry.text() for entry in ordered))
    sys.stdout.write(f"{path.name}: {len(entries)} packages\n")


def refuse_dropped(entries: list[Entry], overrides: Path) -> None:
    """Raises LockError if a package that the override file drops is in the lock all the same."""
    back = dropped_names(overrides) & {entry.name for entry in entries}
    if back:
        message = f"{overrides.name} drops {', '.join(sorted(back))}, yet the lock has it"
        raise LockError(message)


def main() -> None:
    """Writes all locks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", default="uv", help="the uv program to resolve with")
    uv: str = parser.parse_args().uv

    overrides = HERE / "serve.override.txt"
    resolved = narrow(compile_inputs(uv, HERE / "serve.in", overrides=overrides))
    refuse_dropped(resolved, overrides)
    cuda = [entry for entry in resolved if CUDA_NAMES.match(entry.name)]
    serve = [entry for entry in resolved if entry not in cuda]
    write(HERE / "serve.lock", admit_cpu_torch(serve), "serve.in")
    write(HERE / "cpu-torch-cuda.lock", cuda, "serve.in")
    write(HERE / "cpu-torch.lock", [cpu_torch(serve)], "serve.in")

    for name in ("test", "plots"):
        extra = narrow(compile_inputs(uv, HERE / f"{name}.in", constraints=HERE / "serve.lock"))
        write(HERE / f"{name}.lock", without(extra, serve), f"{name}.in")
    # Whole: it goes into an environment of its own.
    grafana = narrow(compile_inputs(uv, HERE / "grafana.in"))
    write(HERE / "grafana.lock", grafana, "grafana.in")

    chart = compile_inputs(
        uv, HERE / "helm.in", constraints=HERE / "serve.lock", dependencies=False
    )
    write(HERE / "helm.lock", without(narrow(chart), serve), "helm.in")

    overrides = HERE / "gpu.override.txt"
    gpu = narrow(compile_inputs(uv, HERE / "gpu.in", overrides=overrides))
    refuse_dropped(gpu, overrides)
    write(HERE / "gpu.lock", gpu, "gpu.in")


if __name__ == "__main__":
    main()
