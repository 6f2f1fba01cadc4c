"""Whether an address can be listened on, as Serve and Ray will, and what to do where it cannot.

Called by serve, before anything is started, by the doctor, and by local_ray.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator

from cluster.config import Config


def listen_briefly(host: str, port: int) -> int:
    """Listen for a moment; returns the port, which is a free one for port 0. Raises OSError."""
    with _bound(host, port) as probe:
        probe.listen(1)
        found: int = probe.getsockname()[1]
        return found


def is_loopback(host: str) -> bool:
    """Whether this machine alone reaches what listens there. host: a name, or an address."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"


def is_behind_proxy(config: Config) -> bool:
    """Whether Serve's proxy listens for clients, and not the ingress itself."""
    return config.http.through == "proxy" or config.ray.address is not None


@contextlib.contextmanager
def held(host: str, *ports: int) -> Iterator[None]:
    """Keep ports from other programs while the block runs; ingresses can listen there."""
    with contextlib.ExitStack() as stack:
        for port in ports:  # who does not listen is given no connection
            stack.enter_context(_bound(host, port))
        yield


def problem_in(error: OSError, host: str, port: int, *, host_flag: str, port_flag: str) -> str:
    """What is wrong, and which flag mends it."""
    what = f"cannot listen on {host}:{port} ({error.strerror or error})"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"{what}: give an address of this machine with {host_flag}"
    return f"{what}: choose another with {port_flag}, or {port_flag} 0 for any free one"


def _bound(host: str, port: int) -> socket.socket:
    # As deployments/edge/front_door.py binds; the doctor must not need that: it may be broken.
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
