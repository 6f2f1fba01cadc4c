"""Where a process on this node listens for other nodes, and which address they are told.

Two things: one configuration is true for all nodes of a cluster, and an address is one node's.
Called by workers (links) and node agents (the slab's peers), each on its own node.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import ray


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """The same on every node.

    Attributes:
        host: address to listen on; empty: the node's own in Ray's books, so that nothing is open
            where Ray itself is not.
        advertised_host: what others are told; empty: the address that is listened on, or the
            node's own where that stands for all of its addresses.

    """

    host: str = ""
    advertised_host: str = ""


@dataclass(frozen=True, slots=True)
class Listening:
    """One node's addresses: to bind, and to tell others."""

    host: str
    advertised_host: str


def listening(settings: ListenSettings, node_ip: str) -> Listening:
    """Settle the settings for the node that Ray knows by ``node_ip``."""
    host = settings.host or node_ip
    told = settings.advertised_host or (node_ip if is_any_address(host) else host)
    return Listening(host, told)


def listening_here(settings: ListenSettings) -> Listening:
    """The same for the node that this process of Ray's runs on."""
    return listening(settings, ray.util.get_node_ip_address())


def is_any_address(host: str) -> bool:
    """Whether listening there means listening on all addresses (0.0.0.0, ::)."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False
