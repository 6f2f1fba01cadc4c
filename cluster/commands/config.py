"""`headwater config`: each value of the configuration with its source.

A value that is auto is shown with what the serve command would choose on this machine now.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from cluster import config_sources
from cluster.auto_values import Choices, has_auto, resolve
from cluster.machine_facts import model_facts
from cluster.node_facts import here

if TYPE_CHECKING:
    import argparse

    from cluster.config import Config


def run(arguments: argparse.Namespace) -> int:
    """Prints the configuration; raises ConfigError if it is not valid."""
    loaded = config_sources.load(arguments)
    choices = choices_here(loaded.config)
    if arguments.json:
        text = as_json(loaded, choices)
    elif arguments.yaml:
        text = as_yaml(loaded, choices)
    else:
        text = as_table(loaded, choices)
    sys.stdout.write(text)
    return 0


def choices_here(config: Config, environ: Mapping[str, str] = os.environ) -> Choices:
    """What auto would become; {} on a running Ray cluster, whose nodes decide it."""
    if config.ray.address is not None or not has_auto(config):
        return {}
    return resolve(config, [here(environ)], model_facts(config, environ).figures).choices


def as_table(loaded: config_sources.Loaded, choices: Choices) -> str:
    """Key, value and source in columns."""
    rows = [("KEY", "VALUE", "SOURCE")]
    for key, _ in config_sources.leaves():
        value = _scalar(loaded, key)
        if _is_chosen(loaded, key, choices):
            value = f"{value} ({choices[key].value})"
        rows.append((key, value, loaded.sources[key]))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}\n" for a, b, c in rows)


def as_json(loaded: config_sources.Loaded, choices: Choices) -> str:
    """An object by key: value, source, description; and what auto is resolved to, and why."""
    values = {
        key: {
            "value": _plain(loaded, key),
            "source": loaded.sources[key],
            "description": info.description,
        }
        for key, info in config_sources.leaves()
    }
    for key, choice in choices.items():
        if _is_chosen(loaded, key, choices):
            values[key] |= {"resolved": choice.value, "why": choice.why}
    return json.dumps(values, indent=2) + "\n"


def as_yaml(loaded: config_sources.Loaded, choices: Choices) -> str:
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
        value = _scalar(loaded, key)
        if _is_chosen(loaded, key, choices):
            value = f"{value}  # {choices[key].value} on this machine"
        lines.append(f"{indent}{name}: {value}")
    return "\n".join(lines) + "\n"


def _is_chosen(loaded: config_sources.Loaded, key: str, choices: Choices) -> bool:
    """Whether the start decides a value: one that is auto, or that auto elsewhere fills in."""
    return key in choices and config_sources.value_of(loaded.config, key) != choices[key].value


def _plain(loaded: config_sources.Loaded, key: str) -> object:
    value = config_sources.value_of(loaded.config, key)
    return str(value) if isinstance(value, Path) else value


def _scalar(loaded: config_sources.Loaded, key: str) -> str:
    """The value as YAML writes it on one line."""
    text: str = yaml.safe_dump(_plain(loaded, key), default_flow_style=True, width=1 << 20)
    return text.removesuffix("\n").removesuffix("\n...")
