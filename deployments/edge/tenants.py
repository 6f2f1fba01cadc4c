"""Whose a request is, and the cache salt that gives its blocks names of their own.

vLLM chains a request's cache salt into the name of its first block, and so into all: what the
engine's cache, the slab, the directory and the router's index know of one tenant's prompt, no
other tenant's request can name. The salt is derived here, with the cluster's secret: a client can
neither choose it nor compute another's.

Called by http_edge.py (`Tenants.of`, from a request's headers), key_gate.py (`Tenants.of_key`,
where keys are set) and engine_client.py (`salted`). Must not refuse a key: who may use the cluster
is decided in key_gate.py; here only who shares blocks.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NewType

# 32 bytes that stand for a tenant: equal for equal tenants in each ingress of a cluster.
Tenant = NewType("Tenant", bytes)

AUTHORIZATION, API_KEY = b"authorization", b"x-api-key"  # OpenAI's clients' and Anthropic's


class TenantUnclear(Exception):
    """A request's headers name two tenants; the message names the header."""


class Tenants:
    """The tenants of one cluster. Pure but for the file that is read first."""

    def __init__(self, secret: bytes, *, header: str = "", keys_file: str = "") -> None:
        """Raises RuntimeError that says what to do when the file of keys is not usable.

        header: of a request, in which a proxy in front names the tenant; empty: none does.
        keys_file: path of the names that keys go by; empty: each key is a tenant.
        """
        self._secret = secret
        self._header = header.lower().encode()
        self._tenants: Mapping[bytes, Tenant] = {}
        self.nobody = self._tenant(b"nobody", b"")
        if keys_file:
            named = _read_keys(keys_file)
            # By digest, so that the time of a look-up tells nothing of the keys.
            self._tenants = {
                self._tenant(b"key", key): self._tenant(b"name", name)
                for key, name in named.items()
            }

    def of(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant:
        """The tenant of a request: as its proxy says, or else its API key, or else nobody's.

        headers: as ASGI has them, names in lower case. Raises TenantUnclear.
        """
        values = _once({AUTHORIZATION, API_KEY, self._header}, headers)
        if self._header and values.get(self._header):
            return self._tenant(b"name", values[self._header])
        authorization = values.get(AUTHORIZATION, b"")
        scheme, _, credentials = authorization.partition(b" ")
        key = credentials.strip() if scheme.lower() == b"bearer" else authorization
        key = key or values.get(API_KEY, b"")
        if not key:
            return self.nobody
        tenant = self._tenant(b"key", key)
        return self._tenants.get(tenant, tenant)

    def of_key(self, tenant: str, headers: Iterable[tuple[bytes, bytes]]) -> Tenant:
        """The tenant that an API key belongs to; within it, whom a proxy in front names.

        Whoever chooses that header chooses among what its own key's tenant may share, and no more.
        Raises TenantUnclear.
        """
        named = _once({self._header}, headers).get(self._header) if self._header else None
        if not named:
            return self._tenant(b"name", tenant.encode())
        return self._tenant(b"named by", tenant.encode() + b"\0" + named)

    def _tenant(self, kind: bytes, value: bytes) -> Tenant:
        return Tenant(_digest(self._secret, b"headwater tenant\0" + kind + b"\0" + value))


def _once(names: set[bytes], headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The values of these headers. Raises TenantUnclear where one has two."""
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in names:
            stripped = value.strip()
            if values.setdefault(name, stripped) != stripped:
                raise TenantUnclear(f"Header {name.decode('latin-1')} is given twice.")
    return values


def alone() -> Tenant:
    """A tenant that no other request has: for what came by no HTTP request of ours."""
    return Tenant(secrets.token_bytes(32))


def salted(tenant: Tenant, cache_salt: str | None) -> str:
    """The cache salt of a tenant's request, 64 hex digits.

    cache_salt: the client's own, which divides the tenant's blocks further; None: it sent none.
    """
    given = b"" if cache_salt is None else b"\1" + cache_salt.encode("utf-8", "surrogatepass")
    return _digest(tenant, b"headwater cache salt\0" + given).hex()


def _digest(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def _read_keys(path: str) -> dict[bytes, bytes]:
    """Names by key. Lines of NAME KEY; empty ones and those that begin with # do not count."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as missing:
        msg = f"tenants.keys_file {path} cannot be read on this node ({missing}); put it there"
        raise RuntimeError(msg) from missing
    named: dict[bytes, bytes] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith(b"#"):
            continue
        if len(words) != 2:  # noqa: PLR2004 - a name and a key; the line itself is not repeated
            msg = f"tenants.keys_file {path}, line {number}: must be NAME KEY, has {len(words)}"
            raise RuntimeError(msg + " words")
        name, key = words
        if named.setdefault(key, name) != name:
            msg = f"tenants.keys_file {path}, line {number}: this key has another name above"
            raise RuntimeError(msg)
    return named
