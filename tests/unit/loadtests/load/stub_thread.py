"""The stub server in a thread of its own, for callers that run a loop themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from loadtests.load.stub_server import Script, StubServer, serving


@contextmanager
def stub(script: Script) -> Iterator[tuple[StubServer, str]]:
    """A running server and its URL."""
    started: SimpleQueue[tuple[StubServer, str, asyncio.AbstractEventLoop]] = SimpleQueue()
    done = asyncio.Event()

    async def serve() -> None:
        async with serving(script) as (server, url):
            started.put((server, url, asyncio.get_running_loop()))
            await done.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    server, url, loop = started.get(timeout=60)
    try:
        yield server, url
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
