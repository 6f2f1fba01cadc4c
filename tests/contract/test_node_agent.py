"""The node agent as Ray runs and restarts it: where readers of other nodes connect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local_ray import LOCAL_ENVIRONMENT
from kvcache.errors import PeerNotTrusted, RegistrationRefused, StoreUnavailable
from kvcache.transport import handshake
from kvcache.transport.handshake import Claim
from tests.unit.kvcache.examples import registration

pytestmark = [pytest.mark.contract, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
SECRET = b"a secret of the cluster's"
TIMEOUT_S = 10.0


@pytest.fixture
def lives() -> Iterator[dict[str, str]]:
    """Addresses of an agent's two lives; it goes on living meanwhile."""
    with tempfile.TemporaryDirectory() as folder:  # short, for the agent's socket
        (Path(folder) / "secret").write_bytes(SECRET)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.agent_lives", folder],
            cwd=ROOT,
            env={**os.environ, **LOCAL_ENVIRONMENT, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            told = next((line for line in process.stdout if line.startswith("{")), "")
            assert told, "it ended before it told"
            yield json.loads(told)
            process.stdin.close()
        assert process.returncode == 0


def said_to(address: str, secret: bytes) -> str:
    """How the peer at this address answers a reader of a model that it has not."""
    host, _, port = address.rpartition(":")
    claim = Claim("control", registration("reader").hello())
    try:
        handshake.connect((host, int(port)), secret, claim, TIMEOUT_S)
    except (PeerNotTrusted, RegistrationRefused, StoreUnavailable) as refused:
        return type(refused).__name__
    return "welcome"


def test_an_agent_that_was_killed_takes_readers_again_and_tells_where(
    lives: dict[str, str],
) -> None:
    first, second = lives["first"], lives["second"]
    assert first.partition(":")[0] == second.partition(":")[0] == "127.0.0.1"
    assert first != second
    assert said_to(first, SECRET) == "StoreUnavailable"
    assert said_to(second, b"another cluster's secret") == "PeerNotTrusted"
    assert said_to(second, SECRET) == "RegistrationRefused"
