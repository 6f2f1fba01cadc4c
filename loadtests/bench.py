"""Runs the benchmarks and keeps their results: `make bench`, or `python -m loadtests.bench`.

Each benchmark runs in a process of its own, one after the other, and rewrites its own section of
loadtests/RESULTS.md. Must not: skip one silently, or run two at once.

A benchmark takes --results FILE and ends with 0, or with EXIT_MISSED where a target was missed.

Exit code: 1 if a benchmark did not run to its end. A target that was missed is shown, and is no
failure unless --strict is given.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from loadtests.results import EXIT_MISSED, RESULTS, ROOT, Setting, write_header

BENCHMARKS = {
    "latency": "loadtests.latency",
    "auto_dtype": "loadtests.auto_dtype",
    "auto_dtype_avx2": "loadtests.auto_dtype --emulate avx2",
    "start": "loadtests.start",
    "tokens": "loadtests.micro.tokens",
    "slab": "loadtests.micro.slab",
    "transport": "loadtests.micro.transport",
    "overlap": "loadtests.micro.overlap",
    "routing": "loadtests.micro.routing",
    "directory": "loadtests.micro.directory",
}

Run = Callable[[str, Path], int]


def run_in_process(module: str, results: Path) -> int:
    """One benchmark's exit code. module: with its own flags after it."""
    command = [sys.executable, "-m", *module.split(), "--results", str(results)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def run_all(names: Sequence[str], results: Path, run: Run = run_in_process) -> dict[str, int]:
    """Exit codes by name, in order; one that fails does not keep the others from running."""
    codes = {}
    for name in names:
        _say(f"\n# {name}: python -m {BENCHMARKS[name]}")
        began_s = time.monotonic()
        codes[name] = run(BENCHMARKS[name], results)
        _say(f"# {name}: {_meaning(codes[name])} after {time.monotonic() - began_s:.0f} s")
    return codes


def exit_code(codes: dict[str, int], *, strict: bool) -> int:
    """1 for a failure, and for a missed target where that counts."""
    accepted = {0} if strict else {0, EXIT_MISSED}
    return int(any(code not in accepted for code in codes.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for and sum it up."""
    parser = argparse.ArgumentParser(description="run the benchmarks and write their results")
    parser.add_argument(
        "--only", action="append", choices=tuple(BENCHMARKS), help="this one; may be repeated"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to keep them in")
    parser.add_argument("--strict", action="store_true", help="a missed target is a failure")
    options = parser.parse_args(arguments)
    names = [name for name in BENCHMARKS if options.only is None or name in options.only]
    write_header(options.results, Setting.here())
    codes = run_all(names, options.results.resolve())
    _say("\n# " + "; ".join(f"{name}: {_meaning(code)}" for name, code in codes.items()))
    _say(f"# written to {options.results}")
    return exit_code(codes, strict=options.strict)


def _meaning(code: int) -> str:
    known = {0: "all targets met", EXIT_MISSED: "ran, with targets MISSED"}
    return known.get(code, f"FAILED with {code}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
