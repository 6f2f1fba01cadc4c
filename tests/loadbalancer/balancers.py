"""Real balancers with the configurations that are shipped (helm/loadbalancer), as own processes."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.commands.test import SBIN
from cluster.ports import listen_briefly
from tests.waiting import wait_until_async

FOLDER = Path(__file__).resolve().parents[2] / "helm" / "loadbalancer"
PLACEHOLDER = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")
DEFAULTS = {
    "BODY_BYTES_MAX": "65536",
    "TRUSTED_PROXIES": "192.0.2.1/32",
    "OPERATOR_NETS": "127.0.0.0/8",
    "CLIENT_STALL": "60s",
    "STREAM_SILENCE": "600s",
}
START_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Balancer:
    """A running one."""

    kind: str
    url: str
    port: int
    process: asyncio.subprocess.Process
    log: Path


def is_there(kind: str) -> bool:
    return shutil.which(kind, path=_path()) is not None


@asynccontextmanager
async def balancer(
    kind: str, ingress_ports: list[int], folder: Path, **settings: str
) -> AsyncIterator[Balancer]:
    """kind: "haproxy" or "nginx"; settings: of the configuration, in the place of DEFAULTS."""
    port = listen_briefly("127.0.0.1", 0)
    one, two = ingress_ports
    given = {
        **DEFAULTS,
        "LISTEN": f"127.0.0.1:{port}",
        "INGRESS_1": f"127.0.0.1:{one}",
        "INGRESS_2": f"127.0.0.1:{two}",
        **settings,
    }
    command = _haproxy() if kind == "haproxy" else _nginx(folder, given)
    log = folder / f"{kind}.log"
    environment = {**os.environ, "PATH": _path(), "CHECK_INTERVAL": "200ms", **given}
    with log.open("ab") as output:  # nginx opens it once more
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=output, stderr=output
        )
    try:
        await wait_until_async(
            lambda: _listens(process, port, log), timeout_s=START_TIMEOUT_S, what=kind
        )
        yield Balancer(kind, f"http://127.0.0.1:{port}", port, process, log)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


def _haproxy() -> list[str]:
    return ["haproxy", "-db", "-f", str(FOLDER / "haproxy.cfg")]


def _nginx(folder: Path, given: Mapping[str, str]) -> list[str]:
    """As envsubst does it, for the names that the file's head lists."""
    text = (FOLDER / "nginx.conf").read_text(encoding="utf-8")
    assert set(PLACEHOLDER.findall(text)) == given.keys()
    made = folder / "nginx.conf"
    made.write_text(PLACEHOLDER.sub(lambda name: given[name[1]], text), encoding="utf-8")
    here = f"daemon off; pid {folder}/nginx.pid; error_log stderr;"
    return ["nginx", "-e", "stderr", "-p", str(folder), "-c", str(made), "-g", here]


async def _listens(process: asyncio.subprocess.Process, port: int, log: Path) -> bool:
    assert process.returncode is None, f"it ended, see {log}"
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


def _path() -> str:
    """Debian has them where only root looks."""
    return os.pathsep.join([os.environ["PATH"], *SBIN])
