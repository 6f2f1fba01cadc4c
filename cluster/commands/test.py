"""`headwater test`: installs what the tests need from the system, then runs pytest.

The launcher has already installed requirements/test.lock. Everything after `test` goes to pytest;
the whole of tests/ runs when nothing names a test.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import PrerequisiteError

SUMMARY = "run the tests (arguments go to pytest)"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class SystemNeed:
    """A program that some test runs, and the Debian package that has it."""

    program: str
    package: str


# Of tests/e2e/nodes, which joins two network namespaces; the rest comes from the environment.
SYSTEM_NEEDS = (
    SystemNeed("ip", "iproute2"),
    SystemNeed("tc", "iproute2"),
    SystemNeed("nsenter", "util-linux"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For the help only: cluster/cli.py passes everything on as `pytest_arguments`."""
    parser.add_argument("pytest_arguments", nargs="*", metavar="ARGUMENT")


def run(arguments: argparse.Namespace) -> int:
    """Runs pytest in place of this process; its closing line and exit code are the command's."""
    provide(missing_needs(), ci=bool(os.environ.get("CI")))
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"--rootdir={ROOT}",
        f"--config-file={ROOT / 'pyproject.toml'}",
    ]
    command += arguments.pytest_arguments
    os.chdir(ROOT)
    sys.stdout.flush()
    os.execv(command[0], command)


def missing_needs() -> list[SystemNeed]:
    """The needs whose program is not on PATH."""
    return [need for need in SYSTEM_NEEDS if shutil.which(need.program) is None]


def provide(
    missing: list[SystemNeed], *, ci: bool, os_release: Path = Path("/etc/os-release")
) -> None:
    """Installs what is missing where we may, else names it; raises PrerequisiteError in CI."""
    if not missing:
        return
    packages = sorted({need.package for need in missing})
    if os.geteuid() == 0 and is_debian(os_release):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        sys.stderr.write(f"Installing {' '.join(packages)}\n")
        for step in (["update", "-qq"], ["install", "-y", "-qq", *packages]):
            subprocess.run(["apt-get", *step], check=True, env=environment, stdout=sys.stderr)
        return
    programs = ", ".join(need.program for need in missing)
    message = (
        f"the tests need {programs}; on Debian and Ubuntu: apt-get install {' '.join(packages)}"
    )
    if ci:
        raise PrerequisiteError(message)
    sys.stderr.write(f"{message}\nTests that need it will be skipped.\n")


def is_debian(os_release: Path) -> bool:
    """Whether this is Debian or made from it."""
    try:
        text = os_release.read_text(encoding="utf-8")
    except OSError:
        return False
    return any(
        line.partition("=")[0] in {"ID", "ID_LIKE"} and ("debian" in line or "ubuntu" in line)
        for line in text.splitlines()
    )
