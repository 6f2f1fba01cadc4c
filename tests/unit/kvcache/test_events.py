import msgspec
import pytest

from kvcache.events import (
    BlockRemoved,
    BlockStored,
    Cleared,
    EventBatch,
    Snapshot,
    decode,
    digest,
    encode,
    engine_source,
    slab_source,
)


def name(n: int) -> bytes:
    return n.to_bytes(8, "little") * 4


def test_a_batch_and_a_snapshot_survive_the_wire() -> None:
    events = (BlockStored(name(1), None, "m"), BlockRemoved(name(2)), Cleared("m"))
    batch = EventBatch(slab_source("n"), "i", 7, "m", events)
    snapshot = Snapshot(engine_source("w"), "i", 7, "m", (name(1), name(3)))
    assert decode(encode(batch)) == batch
    assert decode(encode(snapshot)) == snapshot


@pytest.mark.parametrize("frame", [b"", b"\xc0", b"\x91\xa5other", b"\x80"])
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(frame)


def test_a_digest_does_not_depend_on_order_and_changes_with_each_block() -> None:
    blocks = [name(n) for n in range(1, 20)]
    assert digest(blocks) == digest(reversed(blocks))
    assert digest(blocks) != digest(blocks[1:])
    assert digest([]) == 0
    assert digest(blocks) ^ digest(blocks[:1]) == digest(blocks[1:])
