"""The live page in a real browser: what it must not do, and when its server is gone or closed."""

from __future__ import annotations

import json

import pytest

from deployments.edge.live_page import page_files
from tests.browser.chromium import Page
from tests.browser.live import ask, looked, open_way, shown
from tests.browser.measures import WATCH_CHANGES
from tests.browser.stub_ingress import StubIngress, answer, first_token
from tests.unit.cluster.status_examples import worker
from tests.unit.deployments.record_examples import candidate, decision, finished

pytestmark = pytest.mark.slow


async def test_whatever_a_server_or_model_says_is_shown_as_text(
    page: Page, stub: StubIngress
) -> None:
    evil = "<img src=x onerror=\"window.hacked='{}'\"><script>window.hacked=1</script>"
    stub.status["model"] = evil
    stub.status["degraded"] = [evil]
    stub.status["workers"] = [worker(evil, evil, state=evil, why=evil, degraded=evil)]
    stub.status["directory"]["sources"][0] |= {"source": evil, "freshness": evil, "reason": evil}
    stub.status["requests"]["outcomes"] = {evil: 3}
    stub.status["ingress"] = evil
    stub.nodes = [{"node": evil, "error": evil}]
    made = finished()
    made.detail = evil
    made.decisions = [decision(candidate(evil, evil, 1.0), degraded=(evil,), pull_from=evil)]
    made.attempts[0].worker = made.attempts[0].why = made.attempts[0].outcome = evil
    stub.add("evil", made)
    await shown(page, stub)
    await page.until_shows("#request-rows", "evil")
    await open_way(page)
    stub.script = [json.dumps({"choices": [{"delta": {"content": evil}}]}), *answer("end")]
    await ask(page, evil)
    await page.until_shows("#turns", "prompt tokens cached")
    assert (await page.text("#turns")).count(evil) == 2
    for place in ("#model", "#degraded", "#worker-rows", "#figures", "#ingress", "#slabs-told"):
        assert evil in await page.text(place)
    assert await page.value("document.querySelectorAll('img').length") == 0
    assert await page.value("document.querySelectorAll('script').length") == 1
    assert await page.value("typeof window.hacked") == "undefined"


async def test_it_asks_its_own_server_alone_and_nothing_is_inline(
    page: Page, stub: StubIngress
) -> None:
    stub.script = answer("Yes.")
    await shown(page, stub)
    await ask(page, "Offline?")
    await page.until_shows("#turns", "prompt tokens cached")
    origin = stub.url.partition("/headwater")[0]
    assert len(page.requested) >= len(page_files())
    assert [url for url in page.requested if not url.startswith(f"{origin}/")] == []
    refused = await page.value(
        "(() => { const node = document.createElement('div');"
        "try { node.innerHTML = '<b>x</b>'; return 'taken' } catch { return 'refused' } })()"
    )
    assert refused == "refused"
    page.complaints.clear()  # of the policy, about the line above


async def test_looks_that_find_nothing_new_touch_nothing(page: Page, stub: StubIngress) -> None:
    stub.add("one", finished())
    await shown(page, stub)
    await page.until_shows("#request-rows", "one")
    await page.until("document.querySelector('#slab-rows tr') !== null")
    await page.value("document.querySelector('#worker-rows tr').mine = true")
    await page.value(WATCH_CHANGES)
    await looked(page, stub, 6)
    assert await page.value("window.changes") == []
    stub.status["workers"][0]["running"] = 3
    await page.until("document.querySelector('#worker-rows td:nth-child(4)').innerText === '3'")
    (change,) = await page.value("window.changes")
    assert change.startswith(("childList TD", "characterData"))
    assert await page.value("document.querySelector('#worker-rows tr').mine")


async def test_a_long_conversation_and_many_requests_keep_the_page_small(
    page: Page, stub: StubIngress
) -> None:
    stub.script = answer("Yes.")
    await shown(page, stub)
    for number in range(30):
        await page.value(f"document.querySelector('#question').value = 'Question {number}'")
        await page.click("#send")
        await page.until(
            f"document.querySelector('#turns').innerText.includes('Question {number}') && "
            "document.querySelector('#stop').disabled"
        )
    assert await page.value("document.querySelectorAll('.turn').length") == 40
    assert max(len(body["messages"]) for body in stub.asked) <= 40
    assert all(body["messages"][0]["role"] == "user" for body in stub.asked)
    assert await page.value("document.querySelectorAll('#request-rows li').length") == 10
    await looked(page, stub, 3)  # the last answer is shown whole
    before = await page.value("document.querySelectorAll('*').length")
    await looked(page, stub, 10)
    assert await page.value("document.querySelectorAll('*').length") == before


async def test_a_server_that_goes_is_told_and_one_that_comes_back_is_shown_by_itself(
    page: Page, stub: StubIngress
) -> None:
    await shown(page, stub)
    await page.value("window.same = true")
    assert await page.value("document.querySelector('#trouble').hidden")
    await stub.stop()
    await page.until_shows("#trouble", "The server does not answer as it should: no connection.")
    told = await page.text("#trouble")
    assert "What follows is of " in told and "looks again by itself" in told
    assert await page.text("#state") == "No answer"
    assert await page.value("document.title") == "No answer – Headwater live"
    assert "decode-1" in await page.text("#worker-rows")  # what was known stays, called old
    after = "getComputedStyle(document.querySelector('#fleet-title'), '::after').content"
    assert await page.value(after) == '" (old)"'
    stub.status["ingress"] = "ingress-2"
    stub.status["workers"] = [worker("decode-9", "decode")]
    stub.start()
    await page.until_shows("#state", "Live")
    await page.until_shows("#worker-rows", "decode-9")
    assert await page.value("document.querySelector('#trouble').hidden")
    assert await page.text("#ingress") == "ingress-2"
    assert await page.value(after) == "none"
    assert await page.value("window.same")  # it was not loaded anew


async def test_an_answer_of_another_version_is_told_not_drawn(
    page: Page, stub: StubIngress
) -> None:
    del stub.status["cache"]
    await page.open(stub.url)
    await page.until_shows("#trouble", "another version of Headwater answers: load this page again")


async def test_with_keys_it_asks_for_them_and_each_goes_only_where_it_belongs(
    page: Page, stub: StubIngress
) -> None:
    stub.operator_key, stub.client_key = "op-secret", "client-secret"
    stub.script = answer("Yes.")
    await page.open(stub.url)
    await page.until_shows("#trouble", "The server asks for its operator key")
    assert await page.text("#state") == "Key wanted"
    await page.click("#operator-key")
    await page.write("wrong")
    await page.press("Enter")
    await page.until("document.querySelector('#keys').open")
    await page.value("document.querySelector('#operator-key').value = ''")
    await page.click("#operator-key")
    await page.write("op-secret")
    await page.press("Enter")
    await page.until_shows("#state", "Live")
    await ask(page, "May I?")
    await page.until_shows("#turns .failed", "The API key is missing or wrong (HTTP 401). Give an")
    await page.click("#client-key")
    await page.write("client-secret")
    await page.click("#keys-form button")
    await ask(page, "And now?")
    await page.until_shows("#turns", "prompt tokens cached")
    sent = [headers.get("authorization", "") for headers in stub.headers]
    assert sent == ["", "Bearer client-secret"]
    kept = await page.value(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, location.href])"
    )
    assert "secret" not in kept + "".join(page.requested)


async def test_a_page_that_is_itself_closed_opens_with_the_key_as_a_password(
    page: Page, stub: StubIngress
) -> None:
    stub.operator_key, stub.is_page_closed, stub.client_key = "op-secret", True, "client-secret"
    await page.open(stub.url.replace("//", "//operator:op-secret@"))
    await page.until_shows("#state", "Live")
    await ask(page, "Well?")
    await page.until_shows("#turns .failed", "The API key is missing or wrong (HTTP 401).")
    # The operator's key is no client's, although the browser would have sent it when asked.
    assert [headers.get("authorization") for headers in stub.headers] == [None]


async def test_several_ingresses_that_answer_in_turn_are_told(
    page: Page, stub: StubIngress
) -> None:
    await shown(page, stub)
    assert await page.text("#ingress") == "ingress-1"
    for name in ("ingress-2", "ingress-1"):
        stub.status["ingress"] = name
        await page.until_shows("#ingress", name)
    await page.until_shows("#ingress", "Several ingresses answer in turn")


async def test_while_a_way_comes_and_grows_the_chat_s_buttons_stay_where_they_are(
    page: Page, stub: StubIngress
) -> None:
    await shown(page, stub)
    await page.value(
        "(() => { window.places = new Set(); const look = () => { "
        "const box = document.querySelector('#send').getBoundingClientRect();"
        "window.places.add(`${box.x + scrollX} ${box.y + scrollY}`);"
        "requestAnimationFrame(look) }; look() })()"
    )
    await page.value("document.querySelector('#question').focus({preventScroll: true})")
    for question in ("One?", "Two?"):
        await page.write(question)
        await page.press("Enter")
        await page.until_shows("#steps", "first token predicted after 225 ms")
        assert stub.mine is not None
        first_token(stub.mine)
        stub.say_word("Words ")
        await page.until_shows("#ttft-told", "320 ms in all")
        stub.finish()
        await page.until_shows("#steps li:last-child", "finished")
        await page.until("document.querySelector('#stop').disabled")
    assert len(await page.value("[...window.places]")) == 1
