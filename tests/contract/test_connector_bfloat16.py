"""One real engine in bfloat16 loads back what it published itself (vLLM 0.32).

bfloat16 is packed otherwise inside a block (AMX where there is AMX) and numpy has no such type, so
the connector moves bytes: this shows that the bytes come back as they were.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.connector_engine import EngineProcess
from tests.contract.connector_node import MODEL, Node, model_path, prompt

pytestmark = [pytest.mark.contract, pytest.mark.slow]

SLOT_BYTES = 737_280  # 32 tokens of SmolLM2-135M in bfloat16


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    node = Node(tmp_path_factory.mktemp("node"), slab_bytes=40 * SLOT_BYTES)
    extra = {
        "agent_socket": node.socket_path,
        "owner": "w1",
        "role": "decode",
        "model": MODEL,
    }
    core = int(os.environ.get("HEADWATER_TEST_CORE", "0"))
    process = EngineProcess(model_path(), extra, dtype="bfloat16", core=core)
    try:
        yield process.ready()
    finally:
        process.close()
        node.agent.close()


def test_blocks_in_bfloat16_come_back_byte_for_byte(engine: EngineProcess) -> None:
    ids = prompt()
    first = engine.call("generate", "a", ids, 20)
    assert engine.call("identity")["slot_bytes"] == SLOT_BYTES
    published = engine.call("cache_digest", "a")
    assert engine.call("reset_prefix_cache")
    engine.call("overwrite_cache")
    second: dict[str, Any] = engine.call("generate", "b", ids, 20)
    assert second["report"]["loaded_blocks"] == 25
    assert engine.call("cache_digest", "b") == published
    assert second["tokens"] == first["tokens"]
