"""An HTTP/1 parser that reads a request which offers an upgrade as the request that it is.

A server may ignore an offer (RFC 9110, 7.8), and every stock JDK client makes one (h2c). httptools
cannot be told to: it takes what follows the head for another protocol, and calls the message
complete without its body. So a new parser goes on where that one stopped, with the same framing.
Called by front_door.py. Must not know what a request asks for.
"""

from __future__ import annotations

from typing import Protocol

import httptools

_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"connection"})
_CONNECT = b"CONNECT"  # has no body: what follows is for somebody else


class ParsedRequest(Protocol):
    """What the parser tells, and the headers of the request that it is at."""

    headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None:
        """A head's first byte."""

    def on_url(self, url: bytes) -> None:
        """Part of the target."""

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""

    def on_headers_complete(self) -> None:
        """A head's end."""

    def on_body(self, body: bytes) -> None:
        """Part of the body."""

    def on_message_complete(self) -> None:
        """The request's end. Not yet, while ``RequestParser.is_before_body``."""


class RequestParser:
    """In place of httptools.HttpRequestParser, as uvicorn uses it."""

    def __init__(self, request: ParsedRequest) -> None:
        self._request = request
        self._parser = _new_parser(request)

    @property
    def is_before_body(self) -> bool:
        """Whether httptools is about to stop before the body of a request."""
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != _CONNECT

    def feed_data(self, data: bytes) -> None:
        """Raises httptools.HttpParserError, and HttpParserUpgrade for CONNECT alone."""
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                if not self.is_before_body:
                    raise
                data = data[stopped.args[0] :]
                self._go_on_after_head()
            else:
                return

    def get_http_version(self) -> str:
        """Of the request."""
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        """Of the request."""
        return bytes(self._parser.get_method())

    def should_keep_alive(self) -> bool:
        """Whether another request may follow."""
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        """Never: no upgrade is served."""
        return False

    def _go_on_after_head(self) -> None:
        """Take a parser that reads this request's head again, tells nobody, and goes on."""
        start = b"%b / HTTP/%b\r\n" % (self.get_method(), self.get_http_version().encode())
        framing = [b"%b: %b\r\n" % h for h in self._request.headers if h[0] in _FRAMING]
        self._parser = _new_parser(_AfterHead(self._request))
        self._parser.feed_data(b"".join([start, *framing, b"\r\n"]))


class _AfterHead:
    """Passes on all that comes after the first head."""

    def __init__(self, request: ParsedRequest) -> None:
        self._request = request
        self._is_after = False

    def on_message_begin(self) -> None:
        if self._is_after:
            self._request.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_after:
            self._request.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_after:
            self._request.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_after:
            self._request.on_headers_complete()
        self._is_after = True

    def on_body(self, body: bytes) -> None:
        self._request.on_body(body)

    def on_message_complete(self) -> None:
        self._request.on_message_complete()


def _new_parser(request: ParsedRequest | _AfterHead) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(request)
    # As uvicorn: an answer to the first request may leave although more has come behind it.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
