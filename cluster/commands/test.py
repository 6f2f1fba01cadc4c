"""`headwater test`: installs what the tests need from the system, then runs them.

The launcher has already installed requirements/test.lock. Without arguments, or with --all and
--reruns, tests/suite.py runs the suite. Any other arguments go to one pytest as they are.
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

SUMMARY = "run the tests in minutes, or all of them (--all); other arguments go to pytest"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class SystemNeed:
    """A program that some test runs, and the Debian package that has it."""

    program: str
    package: str


SBIN = ("/usr/sbin", "/sbin")  # where Debian has servers, and only root looks
# Of tests/e2e/nodes, which joins two network namespaces, of tests/loadbalancer, of metrics,
# dashboards and alerts, and of tests/browser; the rest comes from the environment.
SYSTEM_NEEDS = (
    SystemNeed("ip", "iproute2"),
    SystemNeed("tc", "iproute2"),
    SystemNeed("nsenter", "util-linux"),
    SystemNeed("haproxy", "haproxy"),
    SystemNeed("nginx", "nginx-light"),
    SystemNeed("prometheus", "prometheus"),
    SystemNeed("promtool", "prometheus"),
    SystemNeed("chromium", "chromium"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For the help only: cluster/cli.py passes everything on as `pytest_arguments`."""
    parser.add_argument("--all", action="store_true", help="every test, up to an hour")
    parser.add_argument(
        "--reruns", metavar="N", help="run up to N failed tests once more and name them as flaky"
    )
    parser.add_argument("pytest_arguments", nargs="*", metavar="ARGUMENT", help="for pytest")


def run(arguments: argparse.Namespace) -> int:
    """Runs the tests in place of this process; their closing line and exit code are its own."""
    provide(missing_needs(), ci=bool(os.environ.get("CI")))
    words = arguments.pytest_arguments
    if is_for_suite(words):
        command = [sys.executable, "-m", "tests.suite", *words]
    else:
        configuration = (f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}")
        command = [sys.executable, "-m", "pytest", *configuration, *words]
    os.chdir(ROOT)
    sys.stdout.flush()
    os.execv(command[0], command)


def is_for_suite(words: list[str]) -> bool:
    """Whether the arguments ask for the whole suite, and not for tests that they name."""
    return not words or words[0] in {"--all", "--reruns"} or words[0].startswith("--reruns=")


def missing_needs() -> list[SystemNeed]:
    """The needs whose program is neither on PATH nor where servers are."""
    places = os.pathsep.join([os.environ.get("PATH", ""), *SBIN])
    return [need for need in SYSTEM_NEEDS if shutil.which(need.program, path=places) is None]


def provide(
    missing: list[SystemNeed], *, ci: bool, os_release: Path = Path("/etc/os-release")
) -> None:
    """Installs what is missing where we may, else names it; raises PrerequisiteError in CI."""
    if not missing:
        return
    packages = sorted({need.package for need in missing})
    if os.geteuid() == 0 and is_debian(os_release):
        packages = install(packages)
        missing = [need for need in missing if need.package in packages]
        if not missing:
            return
    programs = ", ".join(need.program for need in missing)
    message = (
        f"the tests need {programs}; on Debian and Ubuntu: apt-get install {' '.join(packages)}"
    )
    if ci:
        raise PrerequisiteError(message)
    sys.stderr.write(f"{message}\nTests that need it will be skipped.\n")


def install(packages: list[str]) -> list[str]:
    """Installs Debian packages; returns those that could not be (Ubuntu has no chromium, say)."""
    sys.stderr.write(f"Installing {' '.join(packages)}\n")
    failed = [] if _apt_get("update", "-qq") else list(packages)
    words = ["install", "-y", "-qq", "--no-install-recommends"]
    return failed or [one for one in packages if not _apt_get(*words, one)]


def _apt_get(*words: str) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", *words]
    done = subprocess.run(command, check=False, env=environment, stdout=sys.stderr)
    return done.returncode == 0


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
