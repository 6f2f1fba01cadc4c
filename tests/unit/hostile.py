"""Bytes that mean harm: messages of a protocol with damage done to them, and noise. Seeded.

For the tests of each port of ours; what is sent depends on the seed alone.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

LENGTH = struct.Struct("<I")
LENGTHS = (
    0,
    1,
    3,
    4,
    255,
    4096,
    4097,
    1 << 16,
    (1 << 24) + 1,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
)
# What msgpack's decoders have to get right: depth, sizes that lie, text that is none, numbers.
PIECES = (
    b"\x91" * 2000,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xa2\xff\xfe",
    b"\xd9\x03\xed\xa0\x80",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\x00" * 7,
    b"\xc1",
    b"\xc0",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\x80",
    b"\x90",
)


def frame(body: bytes) -> bytes:
    """With its true length."""
    return LENGTH.pack(len(body)) + body


def damaged_frames(chance: random.Random, frames: Sequence[bytes]) -> bytes:
    """A few of these frames, one after another, some of them changed.

    The length of most is made right again, so that the damage comes to the decoder.
    """
    sent = bytearray()
    for _ in range(chance.randrange(1, 4)):
        body = bytearray(chance.choice(frames)[LENGTH.size :])
        for _ in range(chance.randrange(4)):
            _damage(chance, body)
        whole = frame(bytes(body))
        if chance.random() < 0.2:
            whole = LENGTH.pack(chance.choice(LENGTHS)) + whole[LENGTH.size :]
        if chance.random() < 0.1:
            whole = whole[: chance.randrange(len(whole) + 1)]
        sent += whole
    return bytes(sent)


def _damage(chance: random.Random, body: bytearray) -> None:
    """Mutates."""
    at, way = chance.randrange(len(body) + 1), chance.randrange(6)
    if way == 0 and body:
        body[min(at, len(body) - 1)] = chance.randrange(256)
    elif way == 1 and body:
        body[min(at, len(body) - 1)] ^= 1 << chance.randrange(8)
    elif way == 2:
        body[at:at] = chance.choice(PIECES)
    elif way == 3:
        del body[at : at + chance.randrange(1, 20)]
    elif way == 4:
        body[at:at] = chance.randbytes(chance.randrange(1, 40))
    else:
        body += body[at:]
