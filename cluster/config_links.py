"""Configuration of addresses inside the cluster. Part of cluster/config.py."""

from __future__ import annotations

from pydantic import Field

from cluster.config_section import Section


class LinksConfig(Section):
    """What workers listen on for ingresses (tokens), and node agents for other nodes (blocks)."""

    host: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Address that workers and node agents listen on. Without one, each node's own in "
            "Ray's books: loopback on a cluster that is started here, and where Ray itself "
            "listens on a running one. 0.0.0.0 takes all."
        ),
    )
    advertised_host: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Address that ingresses and other nodes are told. Without one, the address that is "
            "listened on, or with 0.0.0.0 the node's own in Ray's books. Leave it out on several "
            "machines: all would tell the same."
        ),
    )
