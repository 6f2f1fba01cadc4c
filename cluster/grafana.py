"""Dashboards in a Grafana, through grafana-client: read, write, compare.

Called by the command `dashboards`, in an environment that has grafana-client and nothing else of
ours but the standard library (the launcher makes it). Must not import anything that is not there.
Source: Grafana's HTTP API, /api/dashboards/uid, /api/dashboards/db, /api/folders, /api/search.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from cluster.errors import GrafanaError

FOLDER_UID = "headwater"
SEARCH_MAX = 500  # dashboards in our folder
GRAFANAS_OWN = frozenset({"id", "version", "iteration"})  # it changes them at each save
NOT_FOUND, CHANGED = 404, 412
TIMEOUT_S = 20.0

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Remote:
    """A dashboard as Grafana has it. version: what a save must be made of."""

    body: Body
    version: int
    folder_uid: str


def comparable(body: Body) -> Body:
    """Without what Grafana changes by itself."""
    return {name: value for name, value in body.items() if name not in GRAFANAS_OWN}


def as_text(body: Body) -> str:
    """As it is kept in files."""
    return json.dumps(comparable(body), indent=2, sort_keys=True) + "\n"


def difference(name: str, here: Body | None, there: Body | None) -> str:
    """A unified diff from Grafana's to the file's; empty when they are equal."""
    old, new = ("" if body is None else as_text(body) for body in (there, here))
    lines = difflib.unified_diff(
        old.splitlines(keepends=True),
        new.splitlines(keepends=True),
        f"grafana/{name}" if there is not None else "/dev/null",
        f"file/{name}" if here is not None else "/dev/null",
    )
    return "".join(lines)


class Grafana:
    """One Grafana. Every method raises GrafanaError, in one line."""

    def __init__(self, url: str, token: str | None, folder: str) -> None:
        """token: of a service account; None where none is asked for. folder: its title."""
        self._url = _checked(url)
        self._folder = folder
        try:
            from grafana_client import GrafanaApi
            from grafana_client.client import GrafanaException
        except ImportError as missing:
            message = (
                f"grafana-client is not installed here ({missing}). ./headwater dashboards makes "
                "an environment for it; elsewhere: pip install grafana-client, not beside Ray"
            )
            raise GrafanaError(message) from missing
        self._refused: type[Exception] = GrafanaException
        self._api: Any = GrafanaApi.from_url(self._url, token, timeout=TIMEOUT_S)

    def find(self, uid: str) -> Remote | None:
        """A dashboard by its uid; None when there is none."""
        found = self._ask(lambda: self._api.dashboard.get_dashboard(uid), absent=NOT_FOUND)
        if found is None:
            return None
        try:
            meta = found["meta"]
            folder = str(meta.get("folderUid") or "")
            return Remote(found["dashboard"], int(found["dashboard"]["version"]), folder)
        except (KeyError, TypeError, ValueError, AttributeError) as odd:
            raise GrafanaError(f"{self._url} answers as no Grafana does: no {odd}") from odd

    def ours(self) -> list[str]:
        """Uids of all dashboards in our folder."""
        found = self._ask(
            lambda: self._api.search.search_dashboards(
                type_="dash-db", folder_uids=[FOLDER_UID], limit=SEARCH_MAX
            )
        )
        try:
            return sorted(str(one["uid"]) for one in found)
        except (KeyError, TypeError) as odd:
            raise GrafanaError(f"{self._url} answers as no Grafana does: no {odd}") from odd

    def save(self, body: Body, known: Remote | None, message: str) -> None:
        """Write a dashboard into our folder; not if somebody saved it since `known` was read."""
        own = comparable(body) | {"id": None}
        if known is not None:
            own["version"] = known.version
        wanted = {
            "dashboard": own,
            "folderUid": FOLDER_UID,
            "message": message,
            "overwrite": False,
        }
        saved = self._ask(lambda: self._api.dashboard.update_dashboard(wanted), absent=CHANGED)
        if saved is None:
            title = body.get("title", body.get("uid"))
            raise GrafanaError(
                f"{title!r} was changed in Grafana just now, or its title is taken by another "
                "dashboard of the folder; look with ./headwater dashboards diff, then push again"
            )

    def make_folder(self) -> bool:
        """Our folder is there after this; whether it had to be made."""
        found = self._ask(lambda: self._api.folder.get_folder(FOLDER_UID), absent=NOT_FOUND)
        if found is None:
            self._ask(lambda: self._api.folder.create_folder(self._folder, uid=FOLDER_UID))
        return found is None

    def _ask(self, call: Callable[[], Any], *, absent: int | None = None) -> Any:  # noqa: ANN401 - JSON
        """A call's answer; None where its status is `absent`."""
        try:
            return call()
        except self._refused as refused:
            status = getattr(refused, "status_code", 0)
            if status == absent:
                return None
            raise GrafanaError(self._words(status, refused)) from refused
        except (OSError, ValueError) as lost:  # niquests' errors are OSErrors; no JSON: ValueError
            what = type(lost).__name__  # their words name classes and addresses of objects
            message = f"no Grafana answers at {self._url} ({what}); name it with --url"
            raise GrafanaError(message) from lost

    def _words(self, status: int, refused: Exception) -> str:
        what = " ".join(str(getattr(refused, "message", refused)).split())[:200]
        if status in {401, 403}:
            return (
                f"Grafana at {self._url} does not let us ({status}): give the token of a service "
                "account that may edit dashboards, by --token-file or GRAFANA_TOKEN"
            )
        if not status:
            return f"Grafana at {self._url} does not answer ({what}); name another with --url"
        return f"Grafana at {self._url} refuses ({status}): {what}"


def _checked(url: str) -> str:
    """With a slash after its path. Raises GrafanaError."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname)
        usable = usable and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise GrafanaError(f"--url {url!r} is no address such as http://grafana:3000")
    if parts.username or parts.password:
        raise GrafanaError(
            "--url must not hold a password, which every user of this machine could read; put a "
            "service account's token into a file and name it with --token-file"
        )
    return url if url.endswith("/") else f"{url}/"
