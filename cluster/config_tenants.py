"""Configuration of tenants: whose cached blocks a request may use. Part of cluster/config.py."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from cluster.config_section import Section


class TenantsConfig(Section):
    """Who shares cached blocks. Without any of it, all who send the same API key do."""

    header: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9-]{1,64}$",
        description=(
            "Request header in which a proxy in front names the tenant. Set it only where that "
            "proxy is the one way in and replaces what clients send: whoever sets it chooses "
            "whose cached blocks to share."
        ),
    )
    keys_file: Path | None = Field(
        default=None,
        description=(
            "File on each node with an ingress, a line NAME KEY for each API key: keys of one name "
            "share cached blocks. A key that is not in it is a tenant of its own; no key is "
            "refused for it. Read when an ingress starts."
        ),
    )
