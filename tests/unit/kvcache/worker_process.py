"""A worker in a process of its own, for tests that kill or stop one.

Run as `python -m tests.unit.kvcache.worker_process SOCKET OWNER STEP...`; prints a JSON line after
each step, then waits for its standard input to end. Steps: connect; fill (allocates a block and
writes half of it); publish (one whole block, handed off as "hand-over"); lease (that block).
"""

from __future__ import annotations

import contextlib
import json
import sys

from kvcache.store import BlockStore, Grant, checksum
from tests.unit.kvcache.examples import block, content, registration

TIMEOUT_S = 10.0
TTL_S = 60.0


def main(socket_path: str, owner: str, steps: list[str]) -> None:
    store = BlockStore.connect(socket_path, registration(owner), TIMEOUT_S)
    with contextlib.ExitStack() as stack:
        for step in steps:
            slot = -1
            if step == "fill":
                (grant,) = store.allocate([block(1)], TTL_S).result(TIMEOUT_S)
                assert isinstance(grant, Grant)
                half = stack.enter_context(store.filling(grant))
                half[: half.size // 2] = 255
                slot = grant.slot
            elif step == "publish":
                (grant,) = store.allocate([block(2)], TTL_S, "hand-over", TTL_S).result(TIMEOUT_S)
                assert isinstance(grant, Grant)
                with store.filling(grant) as whole:
                    whole[:] = content(block(2))
                    filled = grant.filled(None, checksum(whole))
                assert store.publish([filled]).result(TIMEOUT_S) == (True,)
                slot = grant.slot
            elif step == "lease":
                (ref,) = store.lease_prefix("load", [block(2)], TTL_S).result(TIMEOUT_S)
                slot = ref.slot
            sys.stdout.write(json.dumps({"step": step, "slot": slot}) + "\n")
            sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
