"""One real engine, its own slab, and another node's slab that it can pull from through a proxy.

Called by test_connector_faults.py. Both nodes' agents live in the test's process, so that it can
damage any byte of either. The other node is filled by copying what the engine published in its own.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.identity import Layout, Namespace
from kvcache.slab import HEADER_BYTES
from kvcache.store import BlockStore, Grant, Registration
from kvcache.transport.server import PeerServer
from tests.contract.connector_engine import BLOCK_SIZE, EngineProcess
from tests.contract.connector_node import MODEL, Node, model_path
from tests.contract.cores import core_of
from tests.contract.tiny_models import LARGE_BLOCK_NUMBERS
from tests.equality import Reference
from tests.unit.kvcache.transport.proxy import FlippingProxy
from tests.waiting import wait_until

SECRET = b"a secret of the cluster's"
SLOT_BYTES = 4 * LARGE_BLOCK_NUMBERS  # float32
CONTEXT = 3328
TIMEOUT_S = 30.0


class TwoSlabs:
    """`engine` runs beside `own`; `other` is a node that it pulls from at `address`."""

    def __init__(self, folder: Path, slots: int, model: Path) -> None:
        secret = folder / "secret"
        secret.write_bytes(SECRET + b"\n")
        for name in ("own", "other"):
            (folder / name).mkdir()
        self.own = Node(folder / "own", slots * SLOT_BYTES)
        self.other = Node(folder / "other", slots * SLOT_BYTES)
        self._server = PeerServer(self.other.agent, SECRET)
        self._server.start()
        self.proxy = FlippingProxy(self._server.endpoint)
        self.address = "{}:{}".format(*self.proxy.endpoint)
        extra = {
            "agent_socket": self.own.socket_path, "owner": "worker-1", "role": "decode",
            "model": MODEL, "secret_file": str(secret), "lookup_timeout_s": 10.0,
            "pull_streams": 1, "pull_timeout_s": 10.0,
        }  # fmt: skip
        self.engine = EngineProcess(
            str(model), extra, kv_cache_bytes=192 << 20, core=core_of(), max_model_len=CONTEXT
        ).ready()
        identity = self.engine.call("identity")
        namespace, layout = (
            kind(**{name: identity[name] for name in kind.__dataclass_fields__})
            for kind in (Namespace, Layout)
        )
        registration = Registration("copier", "prefill", os.getpid(), namespace, layout)
        self._readers, self._writers = (
            BlockStore.connect(node.socket_path, registration, TIMEOUT_S)
            for node in (self.own, self.other)
        )

    def close(self) -> None:
        """All of it."""
        self.engine.close()
        self.proxy.__exit__()
        self._readers.close()
        self._writers.close()
        self._server.close()
        self.own.agent.close()
        self.other.agent.close()

    # What requests do

    def compute(self, name: str, ids: list[int], output: int) -> Reference:
        """The tokens without any reuse; their blocks are in the own slab after it."""
        self.forget()
        result = self.engine.call("generate", name, ids, output)
        assert result["report"]["loaded_blocks"] == result["report"]["local_tokens"] == 0
        self.engine.call("synchronise")
        return Reference(result["tokens"], result["leads"])

    def forget(self) -> None:
        """Leave the engine and both slabs nothing."""
        assert self.engine.call("reset_prefix_cache")
        self.engine.call("synchronise")
        for node in (self.own, self.other):
            if MODEL in node.agent.models():
                node.agent.clear(MODEL)

    def move_to_other(self, names: Sequence[bytes]) -> None:
        """The blocks of a prompt are in the other node's slab alone."""
        refs = self._readers.lease_prefix("copy", names, TIMEOUT_S).result(TIMEOUT_S)
        assert len(refs) == len(names)
        outcomes = self._writers.allocate(names, TIMEOUT_S).result(TIMEOUT_S)
        staging = np.empty(SLOT_BYTES, np.uint8)
        filled, parent = [], None
        for ref, grant in zip(refs, outcomes, strict=True):
            assert isinstance(grant, Grant)
            self._readers.read_into(ref, staging)
            filled.append(self._writers.fill(grant, parent, staging))
            parent = grant.hash
        assert all(self._writers.publish(filled).result(TIMEOUT_S))
        self._readers.release("copy")
        self._readers.lease_prefix("settle", [], 1.0).result(TIMEOUT_S)
        self.own.agent.clear(MODEL)

    def hold(self, name: str, ids: list[int], output: int, pull_from: str = "") -> None:
        """Begin a request, up to where it has looked up and leased, and has read nothing."""
        assert self.engine.call("reset_prefix_cache")
        self.engine.call("fault", "hold")
        self.engine.call("add", name, ids, output, pull_from=pull_from)
        self.engine.call("step_until_load", name)
        self.engine.call("wait_held")

    def let_go(self, name: str) -> dict[str, Any]:
        """To the end: tokens and report."""
        self.engine.call("fault", "let_go")
        return dict(self.engine.call("run", name))

    def looked_up(self, names: Sequence[bytes]) -> int:
        """Blocks of it that a look-up in the own slab finds."""
        refs = self._readers.lease_prefix("look", names, TIMEOUT_S).result(TIMEOUT_S)
        self._readers.release("look")
        return len(refs)

    # Damage

    @staticmethod
    def slot_of(node: Node, block: bytes) -> NDArray[np.uint8]:
        """The bytes of a published block, writable."""
        arena = node.agent._arenas[MODEL]
        slot = arena.table._rows.named[block]
        return arena.slab._mapping.slots[slot]

    @staticmethod
    def header_of(node: Node, block: bytes) -> NDArray[np.uint8]:
        """Its shared header."""
        arena = node.agent._arenas[MODEL]
        headers = arena.slab._mapping.headers.reshape(-1, HEADER_BYTES)
        return headers[arena.table._rows.named[block]]

    # The end of each test

    def at_baseline(self, free_blocks: int) -> None:
        """Nothing is leased, filled, quarantined or held, and each load was reported once."""
        self.engine.call("settle")
        self.engine.call("synchronise")
        stats = self.engine.call("stats")
        assert len(stats["load_reports"]) == stats["loads_total"]
        assert (stats["loads_in_progress"], self.engine.call("free_blocks")) == (0, free_blocks)
        for node in (self.own, self.other):
            wait_until(
                lambda node=node: node.ledger().leases == (),  # type: ignore[misc]
                timeout_s=TIMEOUT_S,
                what="leases to end",
            )
            ledger = node.ledger()
            assert (ledger.filling, ledger.quarantined, ledger.leased_slots) == (0, 0, 0)
        wait_until(
            lambda: self.engine.call("stats")["staging_quarantined"] == 0,
            timeout_s=TIMEOUT_S,
            what="staging to be free",
        )


def prompts(count: int, tokens: int, seed: int = 7) -> list[list[int]]:
    """So many different readable prompts of about `tokens` tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model_path()}/tokenizer.json")
    rng = random.Random(seed)
    who = ["merchant", "sailor", "teacher", "doctor", "miller", "baker", "painter", "judge"]
    where = ["harbour", "market", "forest", "castle", "bridge", "library", "mill", "square"]

    def text() -> str:
        return " ".join(
            f"The {rng.choice(who)} met the {rng.choice(who)} at the {rng.choice(where)} "
            f"with {rng.randrange(2, 900)} apples."
            for _ in range(tokens // 10)
        )

    return [list(tokenizer.encode(text()).ids[:tokens]) for _ in range(count)]


def full_blocks(ids: Sequence[int]) -> int:
    """Blocks of a prompt that can be loaded: its last token is computed always."""
    return (len(ids) - 1) // BLOCK_SIZE
