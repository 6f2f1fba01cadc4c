"""`headwater dashboards push|diff|pull`: brings helm/dashboards to a Grafana, and back.

push writes what differs into the folder Headwater; diff shows it and ends with 1 if anything
differs; pull writes Grafana's dashboards of that folder into files. On Kubernetes the chart
provisions the same files. Runs in an environment of its own (cluster/grafana.py says why).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from cluster.cli_options import GRAFANA_TOKEN_VARIABLE
from cluster.errors import GrafanaError
from cluster.grafana import Grafana, Remote, as_text, difference

PREFIX = "headwater-"  # of our uids; the rest is the file's name
SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
DIFFERS = 1

Body = dict[str, Any]


def run(arguments: argparse.Namespace) -> int:
    """Raises GrafanaError."""
    files = _read_files(arguments.dir, may_be_empty=arguments.what == "pull")
    grafana = Grafana(arguments.url, _token(arguments.token_file), arguments.folder)
    if arguments.what == "push":
        return _push(grafana, files)
    if arguments.what == "diff":
        return _diff(grafana, files)
    return _pull(grafana, files, arguments.dir)


def _push(grafana: Grafana, files: dict[str, Body]) -> int:
    if grafana.make_folder():
        _say("made the folder")
    for name, body in files.items():
        known = grafana.find(body["uid"])
        if known is not None and not _differs(name, body, known):
            _say(f"{name}: as it was")
            continue
        grafana.save(body, known, "headwater dashboards push")
        _say(f"{name}: {'new' if known is None else 'changed'}")
    return 0


def _diff(grafana: Grafana, files: dict[str, Body]) -> int:
    code = 0
    for name, body in files.items():
        known = grafana.find(body["uid"])
        found = difference(name, body, known.body if known else None)
        if found:
            code = DIFFERS
            sys.stdout.write(found)
    for uid in sorted(set(grafana.ours()) - {body["uid"] for body in files.values()}):
        code = DIFFERS
        _say(f"only in Grafana: {uid} (pull fetches it)")
    return code


def _pull(grafana: Grafana, files: dict[str, Body], folder: Path) -> int:
    by_uid = {body["uid"]: name for name, body in files.items()}
    for uid in sorted({*grafana.ours(), *by_uid}):
        name = by_uid.get(uid) or f"{uid.removeprefix(PREFIX)}.json"
        if uid not in by_uid and name in files:
            name = f"{uid}.json"
            if name in files:
                raise GrafanaError(f"{name} is another dashboard's file; change the uid {uid!r}")
        if not SAFE_NAME.fullmatch(name.removesuffix(".json")):
            raise GrafanaError(
                f"a dashboard's uid {uid!r} makes no file name; change it in Grafana"
            )
        known = grafana.find(uid)
        if known is None:
            _say(f"{name}: not in Grafana, left as it is")
        elif uid in by_uid and not _differs(name, files[name], known):
            _say(f"{name}: as it was")
        else:
            _write(folder / name, as_text(known.body))
            _say(f"{name}: {'changed' if uid in by_uid else 'new'}")
    return 0


def _differs(name: str, body: Body, known: Remote) -> bool:
    return bool(difference(name, body, known.body))


def _read_files(folder: Path, *, may_be_empty: bool) -> dict[str, Body]:
    """By file name. Raises GrafanaError."""
    files: dict[str, Body] = {}
    uids: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as bad:
            raise GrafanaError(f"{path} cannot be read: {bad}") from bad
        uid = body.get("uid") if isinstance(body, dict) else None
        if not isinstance(uid, str) or not uid:
            raise GrafanaError(f"{path} is no dashboard with a uid; move it elsewhere")
        if uid in uids:
            raise GrafanaError(f"{path.name} and {uids[uid]} have the same uid {uid}; change one")
        uids[uid] = path.name
        files[path.name] = body
    if not files and not may_be_empty:
        raise GrafanaError(f"{folder} has no dashboards (*.json); name a folder with --dir")
    return files


def _token(path: Path | None) -> str | None:
    """Raises GrafanaError where the file has none."""
    if path is None:
        return os.environ.get(GRAFANA_TOKEN_VARIABLE) or None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as bad:
        raise GrafanaError(f"--token-file {path} cannot be read: {bad}") from bad
    if not token or not token.isascii() or len(token.split()) != 1:
        raise GrafanaError(f"--token-file {path} must hold one token and nothing else")
    return token


def _write(path: Path, text: str) -> None:
    """Raises GrafanaError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as bad:
        raise GrafanaError(f"{path} cannot be written: {bad}") from bad


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
