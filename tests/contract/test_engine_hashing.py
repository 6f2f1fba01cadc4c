"""Block names are the same in the ingress, in the engine, and in every process.

Relied upon in vLLM 0.32: kv_cache_utils.NONE_HASH, init_none_hash, get_request_block_hasher,
EngineCore.request_block_hasher.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.engine_harness import BLOCK_SIZE, Harness, running_engine

pytestmark = [
    pytest.mark.contract,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]

TOKENS = [(17 * i) % 4000 for i in range(7 * BLOCK_SIZE + 5)]
PRINT_HASHES = """
import json, sys
from deployments.engine.hashing import block_hashes, hash_root
tokens, salt = json.loads(sys.argv[1]), sys.argv[2]
print(json.dumps([hash_root(), [h.hex() for h in block_hashes(tokens, 32, salt)]]))
"""


@pytest.fixture(scope="module")
def harness(small_model: Path) -> Iterator[Harness]:
    with pytest.MonkeyPatch.context() as patch:
        # What EngineCore's constructor derives its root from, were it not pinned.
        patch.setenv("PYTHONHASHSEED", "77")
        with running_engine(model_path=str(small_model)) as harness:
            yield harness


def _engine_names(harness: Harness, salt: str | None) -> list[bytes]:
    request = harness.request(TOKENS, harness.params(max_tokens=1), cache_salt=salt)
    harness.engine.add(request)
    names = list(harness.engine._scheduler.requests[request.request_id].block_hashes)
    harness.run()
    return names


@pytest.mark.parametrize("salt", [None, "tenant-1"])
def test_the_ingress_names_blocks_as_the_engine_does(harness: Harness, salt: str | None) -> None:
    from deployments.engine.hashing import block_hashes

    names = block_hashes(TOKENS, BLOCK_SIZE, salt)
    assert names == _engine_names(harness, salt)
    assert len(names) == 7
    assert {len(name) for name in names} == {32}
    assert set(names) <= set(harness.engine.cache_snapshot())


def test_a_salt_changes_every_name(harness: Harness) -> None:
    from deployments.engine.hashing import block_hashes

    plain, salted = block_hashes(TOKENS, 32), block_hashes(TOKENS, 32, "tenant-1")
    assert not set(plain) & set(salted)


def test_a_chain_goes_on_from_names_already_known(harness: Harness) -> None:
    from deployments.engine.hashing import block_hashes

    for salt in (None, "tenant-1"):
        names = block_hashes(TOKENS, 32, salt)
        assert block_hashes(TOKENS, 32, salt, known=names[:3]) == names
        assert block_hashes(TOKENS, 32, salt, known=names) == names


def test_the_namespace_states_the_root_that_the_engine_really_uses(harness: Harness) -> None:
    from vllm.v1.core import kv_cache_utils

    from deployments.engine.hashing import HASH_ALGORITHM, hash_root

    namespace = harness.engine.namespace
    assert namespace.hash_root == hash_root() == kv_cache_utils.NONE_HASH.hex()
    assert namespace.hash_algorithm == HASH_ALGORITHM
    assert namespace.block_size == BLOCK_SIZE


@pytest.mark.full
def test_another_process_with_another_hash_seed_gives_the_same_names(harness: Harness) -> None:
    mine = _engine_names(harness, "tenant-1")
    done = subprocess.run(
        [sys.executable, "-c", PRINT_HASHES, json.dumps(TOKENS), "tenant-1"],
        env={**os.environ, "PYTHONHASHSEED": "4242"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    root, names = json.loads(done.stdout.splitlines()[-1])
    assert names == [name.hex() for name in mine]
    assert root == harness.engine.namespace.hash_root


def test_a_root_that_something_reset_is_pinned_again_before_the_next_name(
    harness: Harness,
) -> None:
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import init_none_hash

    from deployments.engine.hashing import block_hashes

    before = block_hashes(TOKENS, 32)
    init_none_hash(sha256_cbor)  # PYTHONHASHSEED is 77 here
    assert block_hashes(TOKENS, 32) == before
