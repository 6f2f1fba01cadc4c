"""The live page in a real browser: read at any width, in light and dark, by keyboard alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.chromium import Page
from tests.browser.live import ask, open_way, shown
from tests.browser.measures import CLIPPED, CONTRAST, OVERFLOW
from tests.browser.stub_ingress import StubIngress, answer
from tests.unit.cluster.status_examples import unlinked, worker
from tests.unit.deployments.record_examples import candidate, decision, finished, record

pytestmark = pytest.mark.slow

CONTRAST_MIN = 4.5  # WCAG 2.2 AA, for text of ordinary size
STALLED = "its engine has not turned for 21 s"
LONG_IDS = ("decode-qyd7v9w2", "prefill-evxxrbe7")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 400, 800, 890, 1250, 1280])
async def test_it_can_be_read_at_any_width_in_light_and_dark(
    page: Page,
    stub: StubIngress,
    width: int,
    dark: bool,  # noqa: FBT001
) -> None:
    decode, first = LONG_IDS
    stub.status["workers"] = [
        worker(decode, "decode", free_blocks=60_123, total_blocks=65_536, queued_tokens=123_456),
        worker(first, "prefill", state="stalled", why=STALLED),
        unlinked("w" * 60, "decode", "refused"),
    ]
    stub.status["degraded"] = [f"{first} stalled: {STALLED}"]
    stub.status["directory"]["sources"][0]["freshness"] = "degraded"
    made = finished()
    made.decisions = [decision(candidate(first, decode, 12_345.0), candidate(None, decode, 9.0))]
    stub.add("f" * 32, made)
    refused = record(ended_s=11.0, outcome="failed", detail="worker_lost: " + "x" * 80)
    stub.add("e" * 32, refused)
    await page.look(width, dark=dark)
    await shown(page, stub)
    await page.until_shows("#request-rows", "ffff")
    await open_way(page)
    await page.until_shows("#steps", "finished")
    await page.click("#story-box summary")
    await fits(page, width)
    await ask(page, "A" * 200)
    stub.say_word("B" * 200)
    await page.until_shows("#turns", "B" * 200)
    await page.value("document.querySelector('#keys').open = true")
    ratio, text, seen = await page.value(CONTRAST)
    assert ratio >= CONTRAST_MIN, (ratio, text)
    assert seen > 80
    await fits(page, width)


async def fits(page: Page, width: int) -> None:
    """Nothing must reach beyond the window, or beyond its own cell."""
    assert await page.value(OVERFLOW) == []
    assert await page.value(CLIPPED) == []
    assert await page.value("document.scrollingElement.scrollWidth") == width


async def test_every_control_has_a_name_and_can_be_reached_and_used_by_keyboard(
    page: Page, stub: StubIngress
) -> None:
    stub.script = answer("Yes.")
    stub.add("one", finished())
    await shown(page, stub)
    await page.until_shows("#request-rows", "one")
    tree = (await page.send("Accessibility.getFullAXTree"))["nodes"]
    controls = [found for found in map(_control, tree) if found is not None]
    assert [one for one in controls if not one[1]] == []
    names = {name for _, name in controls}
    assert {"Your message", "Send", "New conversation", "Tokens at most", "Keys"} <= names
    reached: list[str] = []
    for _ in range(30):
        await page.press("Tab")
        where = "document.activeElement.id || document.activeElement.tagName"
        reached.append(await page.value(where))
        if reached[-1] == "question":
            break
    assert reached[-1] == "question"
    await page.write("By keyboard")
    await page.press("Enter", shift=True)
    await page.write("alone?")
    await page.press("Enter")
    await page.until_shows("#turns", "prompt tokens cached")
    assert stub.asked[0]["messages"][0]["content"] == "By keyboard\nalone?"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert await page.value(outline) == "solid"
    assert await page.text("#chat-news") == "The answer is complete."


def _control(found: dict[str, Any]) -> tuple[str, str] | None:
    """Role and name of a node that takes the focus; None of another."""
    properties = {one["name"]: one["value"].get("value") for one in found.get("properties", ())}
    role = str(found.get("role", {}).get("value", ""))
    if found.get("ignored") or not properties.get("focusable") or role == "RootWebArea":
        return None
    return role, str(found.get("name", {}).get("value", ""))
