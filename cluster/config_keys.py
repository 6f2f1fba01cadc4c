"""Configuration of API keys: who may use the endpoint. Part of cluster/config.py."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from cluster.config_section import Section

KEYS_FILE = "keys.json"  # in the state folder, where keys.file names no other


class KeysConfig(Section):
    """Who is let in. Without a file of keys, whoever reaches the port."""

    file: Path | None = Field(
        default=None,
        description=(
            "File of API keys on each node with an ingress, made by ./headwater keys add; it holds "
            "no key, only their digests. Without it, keys.json in the state folder is used once it "
            "is there, and nothing is closed until then. Named here, it must be there at the start."
        ),
    )
    reload_s: float = Field(
        default=1.0,
        ge=0.05,
        le=3600,
        description=(
            "Seconds between two looks at the file of keys: so long a key that was revoked still "
            "opens. A file that cannot be used keeps the keys that were read last."
        ),
    )
