"""The live page's chat in a real browser, and the way of the request beside it."""

from __future__ import annotations

import asyncio

import pytest

from tests.browser.chromium import Page
from tests.browser.live import LOOKS_TIMEOUT_S, ask, cells, open_way, shown
from tests.browser.stub_ingress import CUT, StubIngress, answer, failing, first_token, refusing
from tests.unit.deployments.record_examples import candidate, decision, finished

pytestmark = pytest.mark.slow


async def test_a_question_streams_its_answer_and_shows_its_way_as_it_goes(
    page: Page, stub: StubIngress
) -> None:
    await shown(page, stub)
    await ask(page, "What is the capital of France?")
    # Before the first token, and with that before the stream's headers, which name the request.
    await page.until_shows("#steps", "first token predicted after 225 ms")
    states = "[...document.querySelectorAll('#steps li')].map((step) => step.dataset.state)"
    assert await page.value(states) == ["done", "done", "doing", *["waiting"] * 4]
    assert await page.text("#ttft-told") == "None yet: no token has been delivered."
    assert stub.mine is not None
    assert await page.text("#way-name") == f"Request {stub.mine.trace_id}"
    first_token(stub.mine)
    stub.say_word("The capital ")
    await page.until_shows("#turns", "The capital")
    await page.until_shows("#ttft-told", "320 ms in all")
    assert await page.value(states) == [*["done"] * 3, "doing", "done", "doing", "waiting"]
    stub.say_word("is Paris.")
    await page.until_shows("#turns", "The capital is Paris.")
    assert await page.value("document.querySelector('#send').disabled")
    stub.finish()
    await page.until_shows("#turns", "64 of 800 prompt tokens cached (8 %).")
    await page.until_shows("#steps", "finished, 5 tokens, after 1.0 s, 64 of 800 prompt tokens")
    steps = await page.text("#steps")
    for words in (
        "800 prompt tokens in 5.0 ms",
        "prefill on p1, then decode on d1 (cheapest); 64 tokens known to be cached",
        "on p1, queued 20.0 ms, computed 200 ms, 0 tokens in the engine's own cache",
        "25 published, 24 loaded",
        "after 320 ms, predicted 225 ms",
        "on d1, 4 tokens, 5.0 tokens/s",
    ):
        assert words in steps
    parts = (await page.text("#ttft-parts")).split("\n")
    assert [part for part in parts if part] == [
        *("Tokenise", "5.0 ms", "Queue", "20.0 ms", "Prefill", "200 ms"),
        *("Publish", "10.0 ms", "Hand-over", "0.0 ms", "Delivery", "85.0 ms"),
    ]
    grown = "[...document.querySelectorAll('#ttft-bar span')].map((bar) => bar.offsetWidth)"
    widths = await page.value(grown)
    assert max(widths) == widths[2] and sum(widths) >= 300  # prefill took most
    assert "Finished after 1.00 s, 5 tokens." in await page.value(
        "document.querySelector('#story').textContent"
    )
    assert not await page.value("document.querySelector('#send').disabled")


async def test_candidates_show_with_their_costs_and_the_chosen_one(
    page: Page, stub: StubIngress
) -> None:
    made = finished()
    best = candidate("p1", "d1", 210.0)
    made.decisions = [decision(best, candidate(None, "d1", 300.0), candidate("p2", "d1", 1234.0))]
    stub.add("one", made)
    await shown(page, stub)
    await page.until_shows("#request-rows", "one")
    await open_way(page)
    await page.until_shows("#decisions", "cheapest, of 3 candidates; in milliseconds.")
    assert await cells(page, "#decisions tbody") == [
        ["p1 > d1 (chosen)", "225", "1", "210", "2", "3", "4", "5", "64", "225"],
        ["– > d1", "315", "1", "300", "2", "3", "4", "5", "64", "315"],
        ["p2 > d1", "1,249", "1", "1,234", "2", "3", "4", "5", "64", "1,249"],
    ]


async def test_the_conversation_goes_with_each_question_as_an_ordinary_client_sends_it(
    page: Page, stub: StubIngress
) -> None:
    stub.script = answer("It is Paris.")
    await shown(page, stub)
    await page.value("document.querySelector('#max-tokens').value = '77'")
    await ask(page, "Capital of France?")
    await page.until_shows("#turns", "It is Paris.")
    await page.until_shows("#turns", "prompt tokens cached")
    await ask(page, "And of Spain?")
    await page.until(
        "document.querySelectorAll('.turn').length === 4 && "
        "document.querySelector('#stop').disabled"
    )
    first, second = stub.asked
    assert first == {
        "model": "m",
        "messages": [{"role": "user", "content": "Capital of France?"}],
        "max_tokens": 77,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert [(m["role"], m["content"]) for m in second["messages"]] == [
        ("user", "Capital of France?"),
        ("assistant", "It is Paris. "),
        ("user", "And of Spain?"),
    ]
    await page.click("#forget")
    await page.until("document.querySelectorAll('.turn').length === 0")
    await ask(page, "New?")
    await page.until_shows("#turns", "prompt tokens cached")
    assert len(stub.asked[-1]["messages"]) == 1


async def test_stop_ends_the_answer_and_the_server_learns_of_it(
    page: Page, stub: StubIngress
) -> None:
    await shown(page, stub)
    await ask(page, "Count for ever.")
    stub.say_word("One ")
    await page.until_shows("#turns", "One")
    await page.click("#stop")
    await page.until_shows("#turns", "Stopped.")
    async with asyncio.timeout(LOOKS_TIMEOUT_S):
        await stub.gone.wait()
    assert not await page.value("document.querySelector('#send').disabled")


@pytest.mark.parametrize("how", ["refused", "fails", "cut"])
async def test_an_answer_that_fails_says_why(page: Page, stub: StubIngress, how: str) -> None:
    await shown(page, stub)
    if how == "refused":
        stub.events.refusal = refusing("All workers are busy and the queue is full.")
    await ask(page, "Well?")
    if how != "refused":
        stub.say_word("So far ")
        await page.until_shows("#turns", "So far")
        stub.say(CUT if how == "cut" else failing("The model's worker was lost twice."))
    words = {
        "refused": "All workers are busy and the queue is full. Try again in about 2 s. (HTTP 429)",
        "fails": "The model's worker was lost twice.",
        "cut": "The answer broke off: the connection ended before its end.",
    }
    await page.until_shows("#turns .failed", words[how])
    assert await page.text("#chat-news") == words[how]
    if how == "refused":
        await page.until_shows("#way-name", "It left no record")
