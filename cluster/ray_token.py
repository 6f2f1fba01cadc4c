"""The token without which nobody talks to a Ray cluster that is started here.

Whoever reaches Ray's ports can run code as their owner, and on loopback that is everybody with an
account on this machine. Ray 2.60 makes such a token by itself, in ~/.ray/auth_token, readable by
all where the umask says so; we make it first, for its owner alone. Called by local_ray.py and by
the serve command. Must not put the token into an environment, an argument or an answer.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
FILE = "ray-token"  # in the state folder, where there is no home to put it in
OWNER_ONLY = 0o600


def token_environment(environ: Mapping[str, str], state_dir: Path) -> dict[str, str]:
    """What Ray is to find in its environment for a cluster of our own; makes the token's file.

    What the user has set stays: another token, another file, or none at all.
    """
    if MODE in environ:
        return {}
    wanted = {MODE: "token"}
    if environ.get(TOKEN) or environ.get(TOKEN_PATH):
        return wanted
    try:
        _make(Path.home() / ".ray" / "auth_token")
    except (OSError, RuntimeError):  # no home, or one that is not ours to write to
        path = (state_dir / FILE).absolute()
        _make(path)
        wanted[TOKEN_PATH] = str(path)
    return wanted


def place_of_token(environ: Mapping[str, str]) -> str | None:
    """Where a person finds the token that the dashboard asks for; None where it asks for none."""
    if environ.get(MODE, "").lower() != "token":
        return None
    if environ.get(TOKEN):
        return f"the environment's {TOKEN}"
    return environ.get(TOKEN_PATH) or "~/.ray/auth_token"


def _make(path: Path) -> None:
    """The file, with a token, if it is not there; for its owner alone in any case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.stat().st_size == 0:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, OWNER_ONLY)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        temporary.replace(path)
    elif path.stat().st_mode & 0o077:
        path.chmod(OWNER_ONLY)
    path.read_bytes()  # whoever cannot read it cannot use it
