"""The live page in a real browser behind the gate of API keys, as an operator meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.edge.asgi import AsgiApp
from tests.browser.chromium import Page
from tests.browser.live import ask
from tests.browser.stub_ingress import StubIngress, answer
from tests.unit.deployments.key_world import ANN, BOSS, Gated, gated

pytestmark = pytest.mark.slow


async def close(stub: StubIngress, folder: Path) -> Gated:
    """Let in nobody without a key."""
    await stub.stop()

    worlds: list[Gated] = []

    def around(app: AsgiApp) -> AsgiApp:
        worlds.append(gated(folder, app=app))
        return worlds[-1].gate

    stub.around = around
    stub.start()
    return worlds[-1]


async def test_an_operator_signs_in_and_the_chat_takes_a_key_of_its_own(
    page: Page, stub: StubIngress, tmp_path: Path
) -> None:
    await close(stub, tmp_path)
    stub.script = answer("Yes.")
    await page.open(stub.url.replace("//", f"//operator:{BOSS}@"))
    await page.until_shows("#state", "Live")
    await page.until_shows("#worker-rows", "prefill-1")
    await ask(page, "Well?")
    await page.until_shows("#turns .failed", "No API key was given")
    assert stub.asked == []
    await page.click("#client-key")
    await page.write(ANN)
    await page.press("Enter")
    await ask(page, "And now?")
    await page.until_shows("#turns", "prompt tokens cached")
    await page.until_shows("#way-name", "Request ")
    assert len(stub.asked) == 1


@pytest.mark.parametrize("who", ["", f"ann:{ANN}@", "operator:wrong@"])
async def test_nobody_else_sees_any_of_it(
    page: Page, stub: StubIngress, tmp_path: Path, who: str
) -> None:
    world = await close(stub, tmp_path)
    looks = stub.looks
    await page.open(stub.url.replace("//", f"//{who}"))
    await page.until("document.readyState === 'complete' && document.body !== null")
    assert not await page.value("document.querySelector('main') !== null")
    assert stub.looks == looks
    assert world.refused, "the gate was asked"
