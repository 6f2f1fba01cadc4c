"""Reads a GGUF file: its metadata and where its tensors lie.

Called by cluster/gguf_conversion.py. Package gguf's own reader takes seconds for a vocabulary (it
slices a memory map value by value), and transformers calls it three times; this one takes a tenth
of a second. It changes nothing and copies no tensor. Source: the GGUF specification, version 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ModelDamagedError

MAGIC = b"GGUF"
VERSION = 3
TEXT_TYPE = 8
ARRAY_TYPE = 9
# Value type number -> struct letter.
SCALAR_FORMATS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
ARRAY_LENGTH_MAX = 1 << 24

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor's name, shape (outermost first) and place in the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata by key, tensors by name, and the mapped bytes that they point into."""

    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorPlace]
    data: NDArray[np.uint8]

    def text(self, key: str) -> str:
        """One text value; raises ModelDamagedError if it is absent or of another type."""
        return self._value(key, str)

    def integer(self, key: str) -> int:
        """One integer; raises as `text` does."""
        return self._value(key, int)

    def number(self, key: str) -> float:
        """One floating-point number; raises as `text` does."""
        return self._value(key, float)

    def texts(self, key: str) -> list[str]:
        """A list of texts; raises as `text` does."""
        return [str(item) for item in self._value(key, list)]

    def integers(self, key: str) -> list[int]:
        """A list of integers; raises as `text` does."""
        return [int(item) for item in self._value(key, list)]

    def _value(self, key: str, kind: type[T]) -> T:
        found = self.metadata.get(key)
        if not isinstance(found, kind):
            message = f"the GGUF file has no usable {key}"
            raise ModelDamagedError(message)
        return found


def read_gguf(path: Path) -> GgufFile:
    """Maps a file and reads its head; raises ModelDamagedError if it is not whole GGUF."""
    with path.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(mapped)
    try:
        return _read_head(cursor, mapped)
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        message = f"{path} is not a whole GGUF file ({error})"
        raise ModelDamagedError(message) from error


def _read_head(cursor: _Cursor, mapped: mmap.mmap) -> GgufFile:
    magic, version, tensor_count, value_count = cursor.numbers("4sIQQ")
    if magic != MAGIC or version != VERSION:
        message = f"not GGUF version {VERSION}: begins with {magic!r}, version {version}"
        raise ModelDamagedError(message)
    metadata: dict[str, object] = {}
    for _ in range(value_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    heads: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(tensor_count):
        name = cursor.text()
        dimensions = cursor.numbers(f"{cursor.number('I')}Q")
        heads.append((name, dimensions[::-1], *cursor.numbers("IQ")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        message = f"general.alignment is {alignment!r}"
        raise ModelDamagedError(message)
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: TensorPlace(name, shape, ggml_type, start + offset)
        for name, shape, ggml_type, offset in heads
    }
    data = np.frombuffer(mapped, dtype=np.uint8)
    return GgufFile(MappingProxyType(metadata), MappingProxyType(tensors), data)


class _Cursor:
    """Walks over the head of a file, value by value."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.at = 0
        self._mapped = mapped

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Little-endian values of a struct format. Moves on."""
        found = struct.unpack_from(f"<{form}", self._mapped, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def number(self, letter: str) -> Any:  # noqa: ANN401  (struct decides)
        """One value. Moves on."""
        return self.numbers(letter)[0]

    def text(self) -> str:
        """A length and that many bytes of UTF-8. Moves on."""
        length: int = self.number("Q")
        end = self.at + length
        if end > len(self._mapped):
            message = "text beyond the end"
            raise struct.error(message)
        found = self._mapped[self.at : end].decode()
        self.at = end
        return found

    def value(self, kind: int) -> object:
        """A metadata value of a type number. Moves on."""
        if kind == TEXT_TYPE:
            return self.text()
        if kind != ARRAY_TYPE:
            return self.number(SCALAR_FORMATS[kind])
        item_kind, length = self.numbers("IQ")
        if length > ARRAY_LENGTH_MAX:
            message = f"array of {length} values"
            raise struct.error(message)
        if item_kind in {TEXT_TYPE, ARRAY_TYPE}:
            return [self.value(item_kind) for _ in range(length)]
        return list(self.numbers(f"{length}{SCALAR_FORMATS[item_kind]}"))
