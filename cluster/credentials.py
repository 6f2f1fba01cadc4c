"""Which API key our own commands show to an endpoint, once keys are set.

HEADWATER_API_KEY, or the operator key that the cluster's secret makes, for the cluster that runs on
this machine: whoever can read that secret is its operator already. Called by cluster/ask.py and by
the commands whose client is the load tool's. Must not put a key into an argument, a file or a log.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from cluster.errors import AnswerError

KEY_VARIABLE = "HEADWATER_API_KEY"
SECRET_FILE = "secret"  # noqa: S105 - a file's name
OPERATOR_PATH = "/headwater"
# Endpoints that a serve command of this machine has written down, and the folder where it did.
_STATE_DIRS: dict[str, Path] = {}


def runs_here(endpoint: str, state_dir: Path) -> None:
    """Remember whose secret an endpoint's cluster has. Called by running.py."""
    _STATE_DIRS[_place(endpoint)] = state_dir


def api_key(endpoint: str, path: str = "") -> str:
    """The key for a path of an endpoint; empty where none is known. Raises AnswerError.

    What operators see takes the operator's key where there is one, whatever the environment has.
    """
    named = os.environ.get(KEY_VARIABLE, "").strip()
    if named and not _is_header_value(named):
        raise AnswerError(f"{KEY_VARIABLE} is no API key: it has characters that none can have")
    here = _STATE_DIRS.get(_place(endpoint))
    if here is None or (named and not path.startswith(OPERATOR_PATH)):
        return named
    return _local_operator_key(here) or named


def headers(endpoint: str, path: str = "") -> Mapping[str, str]:
    """The header that carries it; none without a key."""
    key = api_key(endpoint, path)
    return {"authorization": f"Bearer {key}"} if key else {}


def _local_operator_key(state_dir: Path) -> str:
    # Here, so that the doctor can say that another `deployments` is on the path.
    from deployments.edge.keys import local_operator_key

    try:
        secret = (state_dir / SECRET_FILE).read_bytes().strip()
    except OSError:  # another user's, or made by hand elsewhere
        return ""
    return local_operator_key(secret) if secret else ""


def _place(endpoint: str) -> str:
    """Host and port; a key of this machine goes to no other."""
    return urlsplit(endpoint).netloc


def _is_header_value(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text
