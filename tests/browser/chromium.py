"""A headless Chromium, spoken to by the DevTools protocol: pages as a person sees and uses them."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.waiting import wait_until, wait_until_async

PROGRAM = "chromium"
START_TIMEOUT_S = 60.0
TIMEOUT_S = 20.0
MESSAGE_BYTES_MAX = 64 << 20
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--no-default-browser-check", "--remote-debugging-port=0"),
    *("--disable-extensions", "--mute-audio", "--hide-scrollbars", "--force-color-profile=srgb"),
)
# What a key press is to a page: DevTools wants both names, the code and, of some, the text.
KEYS = {
    "Enter": {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"},
    "Tab": {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9},
    "Space": {"key": " ", "code": "Space", "windowsVirtualKeyCode": 32, "text": " "},
}
SHIFT = 8
# The middle of an element that has not moved for two frames, as a person aims.
PLACE_OF = """(async () => {
  const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
  const node = document.querySelector(%s);
  node.scrollIntoView({ block: 'center' });
  for (let last = '', still = 0; ; ) {
    const box = node.getBoundingClientRect();
    const place = [box.x + box.width / 2, box.y + box.height / 2];
    const hit = document.elementFromPoint(...place);
    still = String(place) === last && node.contains(hit) ? still + 1 : 0;
    if (still >= 2) return place;
    last = String(place);
    await frame();
  }
})()"""


@contextmanager
def chromium(profile: Path) -> Iterator[str]:
    """A browser with an empty profile; yields the address of its DevTools."""
    program = shutil.which(PROGRAM)
    assert program is not None
    log = (profile / "chromium.log").open("wb")
    command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    browser = subprocess.Popen(command, stdout=log, stderr=log)
    told = profile / "DevToolsActivePort"

    def address() -> str | None:
        assert browser.poll() is None, f"chromium ended: {(profile / 'chromium.log').read_text()}"
        lines = told.read_text().splitlines() if told.exists() else []
        return f"ws://127.0.0.1:{lines[0]}{lines[1]}" if len(lines) > 1 else None

    try:
        found = wait_until(address, timeout_s=START_TIMEOUT_S, what="Chromium's DevTools")
        assert found is not None
        yield found
    finally:
        browser.terminate()
        browser.wait(START_TIMEOUT_S)
        log.close()


@dataclass
class Page:
    """One tab, in a context of its own: nothing is shared with another test's."""

    socket: aiohttp.ClientWebSocketResponse
    session: str = ""
    complaints: list[str] = field(default_factory=list)  # errors of scripts, console and policy
    requested: list[str] = field(default_factory=list)
    _answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _sent: int = 0

    async def send(self, method: str, **params: Any) -> Any:
        """One command and its result."""
        self._sent += 1
        answer = self._answers[self._sent] = asyncio.get_running_loop().create_future()
        message = {"id": self._sent, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        await self.socket.send_json(message)
        async with asyncio.timeout(TIMEOUT_S):
            return await answer

    async def listen(self) -> None:
        """Take what the browser says until the connection ends."""
        async for message in self.socket:
            said = json.loads(message.data)
            waiting = self._answers.pop(said.get("id", 0), None)
            if waiting is not None:
                if "error" in said:
                    waiting.set_exception(AssertionError(said["error"]))
                else:
                    waiting.set_result(said["result"])
            elif said.get("sessionId") == self.session:
                self._note(said["method"], said["params"])

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requested.append(said["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in {"error", "warning"}:
            self.complaints.append(json.dumps(said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["source"] != "network":
            self.complaints.append(said["entry"]["text"])

    async def open(self, url: str) -> None:
        """Go there."""
        await self.send("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression is on the page. Raises AssertionError where it throws."""
        found = await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(await self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def until(self, expression: str, *, timeout_s: float = TIMEOUT_S) -> Any:
        """Wait until an expression is true; its value. One that throws is not true yet."""

        async def found() -> Any:
            return await self.value(f"(() => {{ try {{ return {expression} }} catch {{ }} }})()")

        try:
            return await wait_until_async(found, timeout_s=timeout_s, what=expression)
        except AssertionError as late:
            shown = await self.value("document.body.innerText")
            raise AssertionError(f"{late}; shown:\n{shown}\n{self.complaints}") from None

    async def until_shows(self, selector: str, words: str) -> None:
        """Wait until these words can be read there."""
        where, what = json.dumps(selector), json.dumps(words)
        await self.until(f"document.querySelector({where}).innerText.includes({what})")

    async def click(self, selector: str) -> None:
        """Press the mouse on it, once it stands still and nothing covers it."""
        place = await self.value(PLACE_OF % json.dumps(selector))
        at = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
        await self.send("Input.dispatchMouseEvent", type="mousePressed", **at)
        await self.send("Input.dispatchMouseEvent", type="mouseReleased", **at)

    async def press(self, name: str, *, shift: bool = False) -> None:
        """Press a key and let it go."""
        key = {**KEYS[name], "modifiers": SHIFT if shift else 0}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **key)
        key.pop("text", None)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **key)

    async def write(self, text: str) -> None:
        """Type into what has the focus."""
        await self.send("Input.insertText", text=text)

    async def look(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Be so wide, in light or in dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        calm = {"name": "prefers-reduced-motion", "value": "reduce"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme, calm])

    async def picture(self) -> bytes:
        """The whole page as PNG."""
        shot = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def new_page(address: str) -> AsyncIterator[Page]:
    """A tab of a running browser."""
    async with (
        aiohttp.ClientSession() as client,
        client.ws_connect(address, max_msg_size=MESSAGE_BYTES_MAX) as socket,
    ):
        page = Page(socket)
        listening = asyncio.create_task(page.listen())
        context = (await page.send("Target.createBrowserContext"))["browserContextId"]
        made = await page.send("Target.createTarget", url="about:blank", browserContextId=context)
        joined = await page.send("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        page.session = joined["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.send(f"{domain}.enable")
        await page.look(1280)
        try:
            yield page
        finally:
            page.session = ""
            await page.send("Target.disposeBrowserContext", browserContextId=context)
            await socket.close()
            await listening
