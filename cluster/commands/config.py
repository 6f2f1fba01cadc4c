"""`headwater config`: each value of the configuration with its source."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from cluster import config_sources

if TYPE_CHECKING:
    import argparse


def run(arguments: argparse.Namespace) -> int:
    """Prints the configuration; raises ConfigError if it is not valid."""
    loaded = config_sources.load(arguments)
    if arguments.json:
        text = as_json(loaded)
    elif arguments.yaml:
        text = as_yaml(loaded)
    else:
        text = as_table(loaded)
    sys.stdout.write(text)
    return 0


def as_table(loaded: config_sources.Loaded) -> str:
    """Key, value and source in columns."""
    rows = [("KEY", "VALUE", "SOURCE")]
    for key, _ in config_sources.leaves():
        rows.append((key, _scalar(loaded, key), loaded.sources[key]))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}\n" for a, b, c in rows)


def as_json(loaded: config_sources.Loaded) -> str:
    """An object by key: value, source, description."""
    values = {
        key: {
            "value": _plain(loaded, key),
            "source": loaded.sources[key],
            "description": info.description,
        }
        for key, info in config_sources.leaves()
    }
    return json.dumps(values, indent=2) + "\n"


def as_yaml(loaded: config_sources.Loaded) -> str:
    """A file that gives this very configuration when loaded, each value with its description."""
    lines: list[str] = []
    open_sections: list[str] = []
    for key, info in config_sources.leaves():
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                open_sections = sections[: depth + 1]
                lines.append(f"{'  ' * depth}{section}:")
        open_sections = sections
        indent = "  " * len(sections)
        lines += textwrap.wrap(
            info.description or "",
            width=96,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
        )
        lines.append(f"{indent}{name}: {_scalar(loaded, key)}")
    return "\n".join(lines) + "\n"


def _plain(loaded: config_sources.Loaded, key: str) -> object:
    value = config_sources.value_of(loaded.config, key)
    return str(value) if isinstance(value, Path) else value


def _scalar(loaded: config_sources.Loaded, key: str) -> str:
    """The value as YAML writes it on one line."""
    text: str = yaml.safe_dump(_plain(loaded, key), default_flow_style=True, width=1 << 20)
    return text.removesuffix("\n").removesuffix("\n...")
