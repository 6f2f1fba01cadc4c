"""Requests and step outputs as one bytes blob each, with vLLM's own msgpack encoding.

Called by: the ingress (encode_request, decode_outputs) and the worker (decode_request,
encode_outputs), from any thread. Must not: unpickle; vLLM's decoder does so only with
VLLM_ALLOW_INSECURE_SERIALIZATION=1, which environment.py keeps at 0.
Source: vllm/v1/serial_utils.py (0.32): an object becomes one msgpack buffer and, for each tensor
over 256 B, one raw buffer. Blob: u32 count, then count times u32 length, then the buffers.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from vllm.exceptions import VLLMError
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deployments.engine.errors import MalformedBlob

_T = TypeVar("_T")

COUNT_BYTES = 4
MAX_BUFFERS = 4096  # one for each large tensor of a message; far above what a step can hold


class _Codecs(threading.local):
    """One encoder and decoder a thread: vLLM's are not thread-safe when tensors are inside."""

    def __init__(self) -> None:
        self.encoder = MsgpackEncoder()
        self.requests = MsgpackDecoder(EngineCoreRequest)
        self.outputs = MsgpackDecoder(list[EngineCoreOutput])


_codecs = _Codecs()


def encode_request(request: EngineCoreRequest) -> bytes:
    """Encode one request for SUBMIT."""
    return _pack(_codecs.encoder.encode(request))


def decode_request(blob: bytes) -> EngineCoreRequest:
    """Decode what encode_request made. Raises MalformedBlob."""
    return _decode(_codecs.requests, blob, EngineCoreRequest)


def encode_outputs(outputs: Sequence[EngineCoreOutput]) -> bytes:
    """Encode the outputs of one step for OUTPUTS."""
    return _pack(_codecs.encoder.encode(list(outputs)))


def decode_outputs(blob: bytes) -> list[EngineCoreOutput]:
    """Decode what encode_outputs made. Raises MalformedBlob."""
    return _decode(_codecs.outputs, blob, list)


def _decode(decoder: MsgpackDecoder, blob: bytes, kind: type[_T]) -> _T:
    buffers = _unpack(blob)
    try:
        value = decoder.decode(buffers)
    except (
        msgspec.MsgspecError,
        VLLMError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
    ) as error:
        raise MalformedBlob(f"not a {kind.__name__}: {error}") from error
    if not isinstance(value, kind):
        raise MalformedBlob(f"not a {kind.__name__} but a {type(value).__name__}")
    return value


def _pack(buffers: Sequence[bytes | bytearray | memoryview]) -> bytes:
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    header = struct.pack(f"<I{len(views)}I", len(views), *(view.nbytes for view in views))
    return b"".join((header, *views))


def _unpack(blob: bytes) -> list[memoryview]:
    view = memoryview(blob)
    if view.nbytes < COUNT_BYTES:
        raise MalformedBlob(f"{view.nbytes} bytes hold no header")
    (count,) = struct.unpack_from("<I", view)
    start = COUNT_BYTES * (1 + count)
    if not 0 < count <= MAX_BUFFERS or view.nbytes < start:
        raise MalformedBlob(f"header names {count} buffers in {view.nbytes} bytes")
    sizes = struct.unpack_from(f"<{count}I", view, COUNT_BYTES)
    if start + sum(sizes) != view.nbytes:
        raise MalformedBlob(f"buffers of {sum(sizes)} bytes in a blob of {view.nbytes}")
    buffers = []
    for size in sizes:
        buffers.append(view[start : start + size])
        start += size
    return buffers
