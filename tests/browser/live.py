"""What the tests of the live page do with it."""

from __future__ import annotations

from tests.browser.chromium import Page
from tests.browser.stub_ingress import StubIngress
from tests.waiting import wait_until_async

LOOKS_TIMEOUT_S = 20.0


async def shown(page: Page, stub: StubIngress) -> None:
    """Open the page and wait until it has looked."""
    await page.open(stub.url)
    await page.until_shows("#state", "Live")
    await looked(page, stub, 1)
    await page.until("document.querySelector('#figures div') !== null")


async def ask(page: Page, question: str) -> None:
    await page.click("#question")
    await page.write(question)
    await page.press("Enter")


async def cells(page: Page, rows: str) -> list[list[str]]:
    """The texts of a table's body."""
    found: list[list[str]] = await page.value(
        f"[...document.querySelectorAll('{rows} tr')].map((row) => "
        "[...row.children].map((cell) => cell.innerText))"
    )
    return found


async def looked(page: Page, stub: StubIngress, times: int) -> None:
    """Let the page look so often."""
    enough = stub.looks + times

    async def seen() -> bool:
        return stub.looks >= enough

    await wait_until_async(seen, timeout_s=LOOKS_TIMEOUT_S, what=f"{times} looks")


async def open_way(page: Page) -> None:
    """Show the way of the request that is listed first."""
    await page.click("#request-rows summary")
    await page.click("#request-rows button")
    await page.until_shows("#way-name", "Request ")
