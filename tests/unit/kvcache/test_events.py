import msgspec
import pytest

from kvcache.events import (
    BlockRemoved,
    BlockStored,
    Cleared,
    EventBatch,
    Snapshot,
    SourceModels,
    StreamDigest,
    bits_of,
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
    for told in (
        StreamDigest(slab_source("n"), "i", 7, "m", 2, (1 << 64) - 1, 3),
        SourceModels(slab_source("n"), "i", ("m",)),
    ):
        assert decode(encode(told)) == told


@pytest.mark.parametrize("frame", [b"", b"\xc0", b"\x91\xa5other", b"\x80"])
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(frame)


def test_a_digest_does_not_depend_on_order_and_changes_with_each_block() -> None:
    for count in (19, 500):  # few by themselves, many packed
        blocks = [name(n) for n in range(1, count)]
        assert digest(blocks) == digest(blocks[::-1])
        assert digest(blocks) != digest(blocks[1:])
        assert digest(blocks) ^ digest(blocks[:1]) == digest(blocks[1:])
    assert digest([]) == 0


def test_a_digest_of_many_blocks_is_that_of_the_same_blocks_one_by_one() -> None:
    blocks = {name(n * 7919) for n in range(1000)}
    one_by_one = 0
    for block in blocks:
        one_by_one ^= bits_of(block)
    assert digest(blocks) == one_by_one != 0
