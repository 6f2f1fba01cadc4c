"""A node in a process of its own, for tests that kill or stop one.

Run as `python -m tests.unit.kvcache.transport.node_process SOCKET BLOCKS PORT`; publishes chain(
BLOCKS), prints "port N", then waits for its standard input to end. It offers NIXL where UCX_TLS is
set.
"""

from __future__ import annotations

import os
import sys

from kvcache.agent import AgentServer
from kvcache.store import BlockStore
from kvcache.transport.server import PeerServer
from tests.unit.kvcache.conftest import TIMEOUT_S
from tests.unit.kvcache.examples import SLOT_BYTES, chain, registration
from tests.unit.kvcache.steps import publish
from tests.unit.kvcache.transport.conftest import SECRET, describe_for_nixl


def main(socket_path: str, blocks: int, port: int) -> None:
    agent = AgentServer(socket_path, blocks * SLOT_BYTES)
    describe = describe_for_nixl if "UCX_TLS" in os.environ else None
    server = PeerServer(agent, SECRET, port=port, describe=describe)
    server.start()
    writer = BlockStore.connect(socket_path, registration("writer"), TIMEOUT_S)
    publish(writer, chain(blocks))
    sys.stdout.write(f"port {server.endpoint[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.close()
    writer.close()
    agent.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
