"""`headwater prepare`: the model as a folder on this machine, under a name that others are told.

For nodes of a cluster that `serve` does not start: `model_path` of the application is one path for
all of them. Called by an init container of each pod (helm/files/prepare-model.sh). Starts nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from cluster import config_sources
from cluster.auto_values import resolve
from cluster.errors import ModelError
from cluster.kv_room import check_kv_room
from cluster.node_facts import here


def run(arguments: argparse.Namespace) -> int:
    """Prepare it, and point the link at it. Raises ModelError, ConfigError."""
    from cluster.model_store import prepare_model

    config = config_sources.load(arguments).config
    model = prepare_model(
        config.model.path_or_name, config.model.revision, config.state.cache_dir, _say
    )
    resolved = resolve(config, [here()], model.figures).config
    check_kv_room(resolved, model.figures)
    if arguments.link is not None:
        _point(arguments.link, model.path)
    _say(f"Model {config.model.served} is ready in {arguments.link or model.path}.")
    return 0


def _point(link: Path, folder: Path) -> None:
    """Make the link at once, or leave the folder itself where that is what it names."""
    if link.resolve() == folder.resolve():
        return
    temporary = link.with_name(f"{link.name}.{os.getpid()}")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        temporary.symlink_to(folder)
        temporary.replace(link)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        message = (
            f"cannot make {link} lead to {folder} ({error.strerror}): give --link a path that is "
            "free, or a link's"
        )
        raise ModelError(message) from error


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
