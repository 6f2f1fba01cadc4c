"""A stand-in for Grafana that keeps state: folders, dashboards with versions, search, tokens.

Speaks the part of its HTTP API that `headwater dashboards` uses, as Grafana 11 documents it
(HTTP API: Dashboard, Folder, Folder/Dashboard Search): versions grow at each save, a save of an
older version or of a title that the folder has is refused with 412, dashboards get an id.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKEN = "glsa_made-up"


@dataclass
class GrafanaState:
    """What it holds. broken: answer everything with this status; path: everything lies below it."""

    folders: dict[str, dict[str, Any]] = field(default_factory=dict)
    dashboards: dict[str, dict[str, Any]] = field(default_factory=dict)
    folder_of: dict[str, str] = field(default_factory=dict)
    saves: list[str] = field(default_factory=list)
    broken: int = 0
    between: list[dict[str, Any]] = field(default_factory=list)  # saved by others before our save
    agents: set[str] = field(default_factory=set)

    def save(self, body: dict[str, Any], folder_uid: str) -> dict[str, Any]:
        """Store one. Mutates."""
        before = self.dashboards.get(body["uid"])
        version = 1 if before is None else before["version"] + 1
        number = len(self.dashboards) + 1 if before is None else before["id"]
        self.dashboards[body["uid"]] = {**body, "id": number, "version": version}
        self.folder_of[body["uid"]] = folder_uid
        return self.dashboards[body["uid"]]


def _error(code: int, message: str, **more: object) -> web.Response:
    return web.json_response({"message": message, **more}, status=code)


class GrafanaApp:
    """The routes."""

    def __init__(self, state: GrafanaState, prefix: str) -> None:
        self.state = state
        self.app = web.Application(middlewares=[self._guard])
        api = f"{prefix}/api"
        self.app.router.add_get(f"{api}/folders/{{uid}}", self._folder)
        self.app.router.add_post(f"{api}/folders", self._make_folder)
        self.app.router.add_get(f"{api}/search", self._search)
        self.app.router.add_get(f"{api}/dashboards/uid/{{uid}}", self._dashboard)
        self.app.router.add_post(f"{api}/dashboards/db", self._save)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.state.agents.add(request.headers.get("User-Agent", ""))
        if self.state.broken:
            return _error(self.state.broken, "it is broken\nin two lines")
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _error(401, "Invalid API key")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _folder(self, request: web.Request) -> web.Response:
        found = self.state.folders.get(request.match_info["uid"])
        return web.json_response(found) if found else _error(404, "folder not found")

    async def _make_folder(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["uid"] in self.state.folders:
            return _error(412, "a folder with that UID already exists")
        self.state.folders[body["uid"]] = {"uid": body["uid"], "title": body["title"], "id": 1}
        return web.json_response(self.state.folders[body["uid"]])

    async def _search(self, request: web.Request) -> web.Response:
        wanted = request.query.getall("folderUIDs", [])
        assert request.query["type"] == "dash-db"
        return web.json_response(
            [
                {"uid": uid, "title": body["title"], "type": "dash-db"}
                for uid, body in self.state.dashboards.items()
                if self.state.folder_of[uid] in wanted
            ][: int(request.query["limit"])]
        )

    async def _dashboard(self, request: web.Request) -> web.Response:
        uid = request.match_info["uid"]
        if uid not in self.state.dashboards:
            return _error(404, "Dashboard not found")
        body = self.state.dashboards[uid]
        meta = {"folderUid": self.state.folder_of[uid], "version": body["version"], "slug": "s"}
        return web.json_response({"meta": meta, "dashboard": body})

    async def _save(self, request: web.Request) -> web.Response:
        asked = await request.json()
        body, folder = asked["dashboard"], asked["folderUid"]
        for other in self.state.between:
            self.state.save(other, folder)
        self.state.between.clear()
        if folder and folder not in self.state.folders:
            return _error(400, "folder not found")
        before = self.state.dashboards.get(body["uid"])
        stale = before is not None and body.get("version") != before["version"]
        if stale and not asked["overwrite"]:
            words = "The dashboard has been changed by someone else"
            return _error(412, words, status="version-mismatch")
        taken = any(
            other["title"] == body["title"] and uid != body["uid"]
            for uid, other in self.state.dashboards.items()
            if self.state.folder_of[uid] == folder
        )
        if taken and not asked["overwrite"]:
            words = "A dashboard with the same name in the folder already exists"
            return _error(412, words, status="name-exists")
        saved = self.state.save(body, folder)
        self.state.saves.append(body["uid"])
        answer = {"id": saved["id"], "uid": saved["uid"], "version": saved["version"]}
        return web.json_response({**answer, "status": "success"})


@contextlib.contextmanager
def serving(state: GrafanaState, prefix: str = "") -> Iterator[str]:
    """Its address, while the block runs; the server has a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="grafana")
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        runner = web.AppRunner(GrafanaApp(state, prefix).app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, runner.addresses[0][1]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    try:
        yield f"http://127.0.0.1:{port}{prefix}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
