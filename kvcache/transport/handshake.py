"""The first words on a connection between nodes: both sides prove that they know the secret.

    reader  Opening(nonce)          ->
            <- Challenge(nonce, proof)             the node that serves proves itself first
            Proof(claim, proof)     ->             the claim is covered by the proof
            <- Welcome | Refused

A frame is a little-endian u32 length and that much msgpack, at most HANDSHAKE_FRAME_BYTES_MAX, and
the whole exchange has one deadline. A proof is HMAC-SHA256 over who proves, both nonces and the
claim, so that none serves twice, for the other side, or in another protocol of ours. It keeps
strangers out; it does not encrypt, and does not guard against one who can change packets between
the nodes: block headers and checksums turn what such a change breaks into a miss.

Called by the transport's client and server. Blocks, up to its deadline.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvcache.errors import (
    PeerNotTrusted,
    ProtocolError,
    RegistrationRefused,
    StoreUnavailable,
)
from kvcache.protocol import Hello, Refused, Welcome
from kvcache.transport.forks import close_in_children

TRANSPORT_VERSION: Final = 1
HANDSHAKE_FRAME_BYTES_MAX: Final = 16 << 10
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
DIFFERENCE_MAX: Final = 400  # characters; a namespace and a layout have 15 fields
NOT_TRUSTED: Final = "the secret is another one"

_LENGTH = struct.Struct("<I")
_CONTEXT: Final = b"headwater kvcache transport 1 "

Purpose = Literal["control", "data", "nixl"]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
ProofBytes = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
T = TypeVar("T")


class Opening(msgspec.Struct, frozen=True, array_like=True, tag="opening"):
    """Reader to server, first."""

    version: int
    nonce: Nonce


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """Server to reader: its nonce, and its proof."""

    nonce: Nonce
    proof: ProofBytes


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Who the reader is, what its blocks are, and what the connection is for.

    control: leases. data: blocks over TCP. nixl: a description of the slab for NIXL. hello.pid is
    the reader's on its own node.
    """

    purpose: Purpose
    hello: Hello


class Proof(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    """Reader to server: a Claim in msgpack, and the proof that it is the reader's."""

    claim: bytes
    proof: ProofBytes


_OPENINGS: msgspec.msgpack.Decoder[Opening] = msgspec.msgpack.Decoder(Opening)
_CHALLENGES: msgspec.msgpack.Decoder[Challenge | Refused] = msgspec.msgpack.Decoder(
    Challenge | Refused
)
_PROOFS: msgspec.msgpack.Decoder[Proof] = msgspec.msgpack.Decoder(Proof)
_CLAIMS: msgspec.msgpack.Decoder[Claim] = msgspec.msgpack.Decoder(Claim)
_ANSWERS: msgspec.msgpack.Decoder[Welcome | Refused] = msgspec.msgpack.Decoder(Welcome | Refused)


def proof_of(secret: bytes, side: bytes, reader: bytes, server: bytes, claim: bytes = b"") -> bytes:
    """Side is b"reader" or b"server"; reader and server are the nonces, of fixed length."""
    return hmac.digest(secret, _CONTEXT + side + reader + server + claim, hashlib.sha256)


def connect(
    address: tuple[str, int], secret: bytes, claim: Claim, timeout_s: float
) -> tuple[socket.socket, Welcome]:
    """A connection that may be used, blocking and without a time-out.

    Raises PeerNotTrusted; RegistrationRefused, naming the fields; StoreUnavailable.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise StoreUnavailable(f"no peer at {address[0]}:{address[1]}: {error}") from error
    close_in_children(sock)
    try:
        tune(sock)
        welcome = _introduce(sock, secret, claim, deadline_s)
        sock.settimeout(None)
    except (OSError, ProtocolError) as error:
        sock.close()
        raise StoreUnavailable(f"no peer at {address[0]}:{address[1]}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock, welcome


def _introduce(sock: socket.socket, secret: bytes, claim: Claim, deadline_s: float) -> Welcome:
    nonce = secrets.token_bytes(NONCE_BYTES)
    _send(sock, Opening(TRANSPORT_VERSION, nonce), deadline_s)
    challenge = _receive(sock, _CHALLENGES, deadline_s)
    if isinstance(challenge, Refused):
        raise RegistrationRefused(challenge.reason, challenge.differences)
    if not hmac.compare_digest(
        challenge.proof, proof_of(secret, b"server", nonce, challenge.nonce)
    ):
        raise PeerNotTrusted(NOT_TRUSTED)
    packed = msgspec.msgpack.encode(claim)
    proof = proof_of(secret, b"reader", nonce, challenge.nonce, packed)
    _send(sock, Proof(packed, proof), deadline_s)
    answer = _receive(sock, _ANSWERS, deadline_s)
    if isinstance(answer, Refused) and answer.reason == NOT_TRUSTED:
        raise PeerNotTrusted(answer.reason)
    if isinstance(answer, Refused):
        raise RegistrationRefused(answer.reason, answer.differences)
    return answer


def accept(sock: socket.socket, secret: bytes, timeout_s: float) -> Claim:
    """The server's side, up to the claim of a reader that proved itself; answer it with reply().

    Raises PeerNotTrusted, StoreUnavailable (another version), ProtocolError, OSError.
    """
    deadline_s = time.monotonic() + timeout_s
    opening = _receive(sock, _OPENINGS, deadline_s)
    if opening.version != TRANSPORT_VERSION:
        reason = f"transport {opening.version} here, {TRANSPORT_VERSION} there"
        _send(sock, Refused(reason, ()), deadline_s)
        raise StoreUnavailable(reason)
    nonce = secrets.token_bytes(NONCE_BYTES)
    _send(sock, Challenge(nonce, proof_of(secret, b"server", opening.nonce, nonce)), deadline_s)
    given = _receive(sock, _PROOFS, deadline_s)
    expected = proof_of(secret, b"reader", opening.nonce, nonce, given.claim)
    if not hmac.compare_digest(given.proof, expected):
        _send(sock, Refused(NOT_TRUSTED, ()), deadline_s)
        raise PeerNotTrusted(NOT_TRUSTED)
    return _decode(given.claim, _CLAIMS)


def reply(sock: socket.socket, answer: Welcome | Refused, timeout_s: float) -> None:
    """Sends the end of the handshake. Raises OSError."""
    if isinstance(answer, Refused):  # it quotes what the reader sent
        quoted = tuple(difference[:DIFFERENCE_MAX] for difference in answer.differences)
        answer = Refused(answer.reason[:DIFFERENCE_MAX], quoted)
    _send(sock, answer, time.monotonic() + timeout_s)


def tune(sock: socket.socket) -> None:
    """Small messages go at once, and a node that has vanished is noticed when nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _send(sock: socket.socket, message: msgspec.Struct, deadline_s: float) -> None:
    body = msgspec.msgpack.encode(message)
    assert len(body) <= HANDSHAKE_FRAME_BYTES_MAX, "a namespace of that size is ours to shorten"
    sock.settimeout(max(0.001, deadline_s - time.monotonic()))
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[T], deadline_s: float) -> T:
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size, deadline_s))
    if length > HANDSHAKE_FRAME_BYTES_MAX:
        raise ProtocolError(f"a handshake of {length} bytes; at most {HANDSHAKE_FRAME_BYTES_MAX}")
    return _decode(_receive_exactly(sock, length, deadline_s), decoder)


def _receive_exactly(sock: socket.socket, size_bytes: int, deadline_s: float) -> bytes:
    received = bytearray()
    while len(received) < size_bytes:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        part = sock.recv(size_bytes - len(received))
        if not part:
            raise ProtocolError("the other end closed the connection during the handshake")
        received += part
        if time.monotonic() >= deadline_s:
            raise ProtocolError("the handshake took too long")
    return bytes(received)


def _decode(body: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed handshake of {len(body)} bytes: {error}") from error
