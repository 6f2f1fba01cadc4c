"""One real engine in bfloat16 loads back what it published itself (vLLM 0.32).

bfloat16 is packed otherwise inside a block (AMX where there is AMX) and numpy has no such type, so
the connector moves bytes: this shows that the bytes come back as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.connector_engine import EngineProcess
from tests.contract.connector_node import MODEL, Node, prompt
from tests.contract.cores import core_of
from tests.contract.tiny_models import LARGE_BLOCK_NUMBERS
from tests.equality import TIE_NATS, Reference, check_tokens

pytestmark = [pytest.mark.contract, pytest.mark.slow]

SLOT_BYTES = 2 * LARGE_BLOCK_NUMBERS


@pytest.fixture(scope="module")
def engine(
    large_block_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    node = Node(tmp_path_factory.mktemp("node"), slab_bytes=40 * SLOT_BYTES)
    extra = {
        "agent_socket": node.socket_path,
        "owner": "w1",
        "role": "decode",
        "model": MODEL,
    }
    process = EngineProcess(str(large_block_model), extra, dtype="bfloat16", core=core_of())
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
    # The prompt's tail was computed in another batch.
    reference = Reference(first["tokens"], first["leads"], TIE_NATS["bfloat16"])
    check_tokens(second["tokens"], reference)
