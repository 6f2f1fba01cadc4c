"""The model that a plan is about: its config and, where it is here, the folder with its weights.

Called by the plan command. It must not fetch weights, or start anything: of a hub model only the
config is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import running
from cluster.ask import get_json
from cluster.config import BUNDLED_MODEL, Config
from cluster.errors import AnswerError, ModelError, ModelNotFoundError, NotRunningError
from cluster.model_store import ready_bundled
from loadtests.planner.shape import Shape, UnknownShape, read_config, shape_of


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """folder: None where only the config is here."""

    name: str
    config: Mapping[str, Any]
    shape: Shape
    folder: Path | None


def find_model(config: Config, *, named: bool) -> PlannedModel:
    """The named one; without a name the one that is served here, else the configured one.

    Raises ModelError, which says what to do.
    """
    wanted = config.model.path_or_name
    if not named:
        wanted = _served_here(config) or wanted
    path = _config_file(wanted, config)
    try:
        found = read_config(path)
        shape = shape_of(found)
    except UnknownShape as unknown:
        raise ModelError(f"{wanted}: {unknown}") from unknown
    folder = path if path.is_dir() else path.parent
    return PlannedModel(wanted, found, shape, folder if path.is_dir() else None)


def _served_here(config: Config) -> str | None:
    """Where the running cluster has its model, by its own list of models."""
    try:
        endpoint = running.read(config.state.dir).endpoint
        root = get_json(endpoint, "/v1/models")["data"][0]["root"]
    except (NotRunningError, AnswerError, LookupError, TypeError):
        return None
    return str(root) if Path(str(root)).is_dir() else None


def _config_file(wanted: str, config: Config) -> Path:
    """A folder, or a config.json. Raises ModelNotFoundError."""
    path = Path(wanted).expanduser()
    if path.exists():
        return path
    if wanted == BUNDLED_MODEL:
        ready = ready_bundled(config.state.cache_dir)
        if ready is not None:
            return ready
        raise ModelNotFoundError(
            f"{BUNDLED_MODEL} is not prepared yet: ./headwater serve does it, or name a config: "
            "--model FOLDER_OR_CONFIG_JSON"
        )
    if wanted.count("/") == 1 and wanted[0] not in "./~":
        return _from_hub(wanted, config.model.revision)
    raise ModelNotFoundError(
        f"there is no {wanted}; a model is a folder, a config.json or a hub name (owner/name)"
    )


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as failed:
        why = " ".join(str(failed).split())[:200]
        raise ModelNotFoundError(
            f"the config of hub model {name} cannot be had ({why}); save its config.json and name "
            "it: --model PATH"
        ) from failed
