"""ASGI as our middlewares use it: its types, and the path of a request. For http_edge.py and co."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


def route_path(scope: Scope) -> str:
    """The path that the application routes by: without the prefix that it is mounted under.

    As starlette._utils.get_route_path (1.x) has it; what differs would pass unchecked.
    """
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    is_below = path == root or path.startswith(f"{root}/")
    return path[len(root) :] if root and is_below else path
