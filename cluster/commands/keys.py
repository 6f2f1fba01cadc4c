"""`headwater keys add|list|revoke`: who may use the endpoint.

A key is shown once, on stdout, by `add`; the file holds its digest alone. A running cluster takes
changes up within keys.reload_s. cluster/key_store.py changes the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass

from cluster import config_sources
from cluster.cli_options import KEY_LIMITS
from cluster.config import keys_file_of
from cluster.errors import KeysError
from cluster.key_store import KeyStore
from deployments.edge.keys import KeyEntry, KeyLimits, KeyScope


@dataclass(frozen=True, slots=True)
class _Asked:
    """A change that was asked for, with what `add` alone takes."""

    name: str
    tenant: str
    scope: KeyScope
    limits: KeyLimits


def run(arguments: argparse.Namespace) -> int:
    """Do it. Raises KeysError, which says what is in the way."""
    store = KeyStore(arguments.file or keys_file_of(config_sources.load(arguments).config))
    if arguments.action == "list":
        if arguments.name is not None:
            raise KeysError("keys list takes no name: it lists all")
        sys.stdout.write(_as_json(store) if arguments.json else _as_table(store))
    elif arguments.name is None:
        raise KeysError(f"keys {arguments.action} needs the key's name")
    elif arguments.action == "add":
        _add(store, _asked(arguments))
    else:
        left = store.revoke(arguments.name)
        _say(f"The key {arguments.name} opens nothing any more. {_closed(left)}")
    return 0


def _asked(arguments: argparse.Namespace) -> _Asked:
    limits = KeyLimits(**{field: getattr(arguments, field) for field in KEY_LIMITS})
    scope = KeyScope.OPERATOR if arguments.operator else KeyScope.API
    return _Asked(arguments.name, arguments.tenant or arguments.name, scope, limits)


def _add(store: KeyStore, asked: _Asked) -> None:
    """The key goes to stdout, and all else beside it: KEY=$(./headwater keys add ann)."""
    was_open = not store.path.exists()
    key = store.add(asked.name, asked.tenant, asked.scope, asked.limits)
    _say(f"Key {asked.name}, tenant {asked.tenant}. It is shown now and never again:")
    sys.stdout.write(f"{key}\n")
    sys.stdout.flush()
    if was_open:
        _say(
            f"{store.path} is new: a cluster that reads it is closed from now on to all without a "
            "key, but for /health and /ready."
        )


def _closed(left: int) -> str:
    if left:
        return f"{left} left."
    return "None is left, and the endpoint stays closed."


def _as_json(store: KeyStore) -> str:
    rows = [
        {
            "name": entry.name,
            "scope": entry.scope.value,
            "tenant": entry.tenant,
            "created": entry.created,
            **{field: getattr(entry.limits, field) for field in KEY_LIMITS},
        }
        for entry in store.entries()
    ]
    return json.dumps({"file": str(store.path), "keys": rows}, indent=2) + "\n"


def _as_table(store: KeyStore) -> str:
    """In columns, with no digest: nobody has a use for one."""
    entries = store.entries()
    if not entries:
        return f"No API keys in {store.path}; ./headwater keys add NAME makes one.\n"
    rows = [("NAME", "SCOPE", "TENANT", "CREATED", "LIMITS"), *map(_row, entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(f"{row[at]:<{width}}" for at, width in enumerate(widths)), row[4]]).rstrip()
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _row(entry: KeyEntry) -> tuple[str, str, str, str, str]:
    short = {"requests_per_min": "requests/min", "tokens_per_min": "tokens/min"}
    limits = [
        f"{value} {short.get(field, field)}"
        for field in KEY_LIMITS
        if (value := getattr(entry.limits, field)) is not None
    ]
    return entry.name, entry.scope.value, entry.tenant, entry.created, ", ".join(limits) or "none"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
