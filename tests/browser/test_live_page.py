"""The live page in a real browser: the fleet, figures, requests and their ways."""

from __future__ import annotations

import pytest

from tests.browser.chromium import Page
from tests.browser.live import cells, looked, open_way, shown
from tests.browser.stub_ingress import StubIngress
from tests.unit.cluster.status_examples import NODE, node, unlinked, worker
from tests.unit.deployments.record_examples import decision, finished, lost, prefill, pulled, record

pytestmark = pytest.mark.slow

STALLED = "its engine has not turned for 21 s"
STALLED_FIGURES = ("2", "5", "777", "120 of 135", "31", "17", "25 %")


async def test_the_fleet_shows_each_worker_and_slab_as_the_status_has_it(
    page: Page, stub: StubIngress
) -> None:
    stub.status["workers"] = [
        worker("decode-1", "decode", state="stalled", why=STALLED),
        worker("prefill-1", "prefill", queued_tokens=4096, prompt_tokens_total=0),
        unlinked("decode-2", "decode", "starting"),
    ]
    stub.nodes = [node(), {"node": "f" * 56, "error": "the node's agent is silent for 5 s"}]
    await shown(page, stub)
    await page.until("document.querySelectorAll('#slab-rows tr').length === 2")
    assert await cells(page, "#worker-rows") == [
        ["decode-1", "decode", f"stalled: {STALLED}", *STALLED_FIGURES],
        ["prefill-1", "prefill", "ready", "2", "5", "4,096", "120 of 135", "31", "17", "–"],
        ["decode-2", "decode", "starting", *"–––––––"],
    ]
    assert await cells(page, "#slab-rows") == [
        [f"{NODE[:12]}…", "182", "170", "11", "1", "0", "3", "1"],
        ["ffffffffffff…", *"–––––––"],
    ]
    assert await page.text("#slabs-told") == "ffffffffffff…: the node's agent is silent for 5 s"


async def test_queue_caches_directory_and_what_is_degraded_show(
    page: Page, stub: StubIngress
) -> None:
    stub.status["degraded"] = ["directory does not answer: routing by load"]
    stub.status["directory"]["sources"][1] |= {"freshness": "degraded", "reason": "gap"}
    note = {"role": "decode", "replicas": 2, "replicas_min": 1, "replicas_max": 3}
    stub.status["scaling"] = [{**note, "action": "up", "why": "KV 91 % full"}]
    stub.status["workers"][0]["kv_copies"] = "host"
    await shown(page, stub)
    figures = (await page.text("#figures")).replace("\n", " ")
    assert "Requests now 1 prefill, 3 decode" in figures
    assert "4 of 40 places taken, 32 of them engine slots; 6 of the rejected" in figures
    assert "12 finished, 1 cancelled, 0 rejected, 0 failed" in figures
    assert "– of 0 prompt tokens in the last minute; 25 % of 400 in all" in figures
    assert "52 of 100,000 blocks known" in figures
    assert "Autoscaling decode 2, of 1 to 3; up: KV 91 % full" in figures
    assert "Block copies, host decode-1" in figures
    assert "Audits" not in figures
    sources = await page.text("#sources")
    assert f"slab:{NODE[:12]}…: 44 blocks" in sources and "exact" in sources
    assert "engine:decode-1: 8 blocks" in sources and "degraded (gap)" in sources
    told = await page.text("#directory-told")
    assert told == (
        "Directory heard 0.3 s ago; digests 31 equal, 1 different; out of sync: 2 gap, 1 digest."
    )
    assert "directory does not answer" in await page.text("#degraded")
    assert await page.value("document.title") == "Degraded – Headwater live"
    stub.status["degraded"] = []
    await page.until("document.querySelector('#degraded').hidden")
    await page.until("document.title === 'Headwater live'")


async def test_slow_requests_come_first_and_tell_their_story_which_stays_open(
    page: Page, stub: StubIngress
) -> None:
    slow = finished()
    slow.delivered_s = 11.9
    stub.add("slow", slow)
    stub.add("quick", finished())
    await shown(page, stub)
    await page.until_shows("#request-rows", "quick")
    first = "#request-rows li:first-child"
    assert (await page.text(f"{first} b")) == "1,900 ms"
    assert "delivery 1,665 ms, 800 tokens in, 5 out, finished, p1 > d1" in await page.text(first)
    await page.click(f"{first} summary")
    await page.until_shows(f"{first} pre", "Decision: prefill on p1, then decode on d1 (cheapest)")
    for number in range(12):  # slower ones come; it would fall out of the list
        later = finished()
        later.delivered_s = 20.0 + number
        stub.add(f"slower-{number}", later)
    await page.until_shows(f"{first} summary", "slower-11")
    kept = "[...document.querySelectorAll('#request-rows li')].find((row) => row.dataset.key === "
    assert "prefill on p1" in str(await page.value(f"{kept}'slow').querySelector('pre').innerText"))
    stub.add("latest", finished())
    await looked(page, stub, 2)
    assert "latest" not in await page.text(f"{first} summary")
    await page.click("#requests input[value=newest]")
    await page.until_shows(f"{first} summary", "latest")


async def test_a_listed_request_shows_its_way(page: Page, stub: StubIngress) -> None:
    moved = record(
        lost(),
        prefill(at_s=10.2, first_s=10.5),
        pulled(22),
        decisions=[decision(), decision(pull_from="node-a", degraded=("slab:a",))],
        first_token_s=10.5,
    )
    stub.add("moved", moved)
    await shown(page, stub)
    await page.until_shows("#request-rows", "moved")
    await open_way(page)
    assert await page.text("#way-name") == "Request moved"
    steps = await page.text("#steps")
    assert "24 loaded; 22 of them from other nodes in 12.0 ms" in steps
    assert "went on after 1 lost attempt" in steps
    attempts = await page.text("#attempts")
    assert "5.0 ms: p0 as prefill (new): 0 tokens, lost: silent for 10 s" in attempts
    assert "blocks from node node-a" in attempts
    told = await page.text("#decisions")
    assert "Blocks come from node node-a. The directory was not sure of slab:a." in told
    assert await page.value("document.activeElement.id") == "way-title"


async def test_a_way_that_one_ingress_does_not_know_is_asked_for_again_and_then_given_up(
    page: Page, stub: StubIngress
) -> None:
    stub.add("one", finished())
    await shown(page, stub)
    await page.until_shows("#request-rows", "one")
    stub.hidden = 2  # as of an ingress that has other requests
    await page.click("#request-rows summary")
    await page.click("#request-rows button")
    await page.until_shows("#way-name", "Request one")
    stub.hidden = 1000
    await page.click("#request-rows button")
    await page.until_shows("#way-name", "one: No record of one. (HTTP 404).")
    seen = "document.querySelector('#steps').checkVisibility({visibilityProperty: true})"
    assert not await page.value(seen)
