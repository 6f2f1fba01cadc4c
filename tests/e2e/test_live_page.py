"""The live page against a whole cluster, in a real browser: what it shows is what there is."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.edge.live_page import LIVE_PATH
from tests.browser.chromium import PROGRAM, Page, chromium, new_page
from tests.browser.live import ask, cells
from tests.e2e.conftest import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ANSWER_TIMEOUT_S = 120.0
# Some 600 tokens, long enough for a hand-over.
QUESTION = "Which lighthouse is the oldest? " + " ".join(
    f"Lighthouse {number} was built in the year {1600 + 7 * number} on a rock."
    for number in range(30)
)


@pytest.fixture
async def page(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Page]:
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"missing: {PROGRAM}")
    with chromium(tmp_path) as address:
        async with new_page(address) as made:
            await made.open(f"{cluster.endpoint}{LIVE_PATH}?interval=0.3")
            await made.until_shows("#state", "Live")
            yield made
            assert made.complaints == []


async def answered(page: Page, question: str, turns: int) -> str:
    """Ask, and wait for the end of the answer; the name of the request."""
    await page.click("#question")
    await page.value(f"document.querySelector('#question').value = {question!r}")
    await page.press("Enter")
    await page.until(
        f"document.querySelectorAll('.turn').length === {turns} && "
        "document.querySelector('#stop').disabled",
        timeout_s=ANSWER_TIMEOUT_S,
    )
    await page.until_shows("#steps li:last-child", "finished")
    return (await page.text("#way-name")).removeprefix("Request ")


async def test_the_page_shows_the_cluster_and_the_way_of_a_request_as_they_are(
    cluster: Cluster, page: Page
) -> None:
    workers = {worker["id"]: worker for worker in cluster.status()["workers"]}
    rows = {row[0]: row for row in await cells(page, "#worker-rows")}
    assert rows.keys() == workers.keys()
    for name, worker in workers.items():
        assert rows[name][1:3] == [worker["role"], "ready"]
        total = f"{worker['total_blocks']:,}"
        assert rows[name][6] == f"{total} of {total}"
    await page.value("document.querySelector('#max-tokens').value = '24'")
    cold = await answered(page, QUESTION, 2)
    record = cluster.record(cold)
    steps = await page.text("#steps")
    assert f"{record['prompt_tokens']} prompt tokens in " in steps
    (decided,) = record["decisions"]
    assert len(record["attempts"]) == 2 and decided["prefill"] is not None  # it was handed over
    assert f"prefill on {decided['prefill']}, then decode on {decided['decode']}" in steps
    published = sum(attempt["kv"]["published_blocks"] for attempt in record["attempts"])
    loaded = sum(attempt["kv"]["loaded_blocks"] for attempt in record["attempts"])
    assert loaded > 0
    assert f"{published} published, {loaded} loaded" in steps
    ttft_ms = record["ttft"]["total_ms"]
    told = await page.text("#ttft-told")
    value, in_ms = float(re.findall(r"[\d,.]+", told)[0].replace(",", "")), " ms" in told
    assert value * (1 if in_ms else 1e3) == pytest.approx(ttft_ms, abs=0.51 if in_ms else 51)
    costs = [row[1] for row in await cells(page, "#decisions tbody")]
    assert costs == [f"{round(one['cost_ms']):,}" for one in decided["candidates"]]
    story = await page.value("document.querySelector('#story').textContent")
    assert story == cluster.cli("explain", cold).stdout.rstrip("\n")

    await page.click("#forget")
    warm = await answered(page, QUESTION, 2)
    assert warm != cold
    note = await page.text("#turns .turn:last-child p")
    cached = int(re.findall(r"([\d,]+) of [\d,]+ prompt tokens cached", note)[0].replace(",", ""))
    assert cached >= 32 * (record["prompt_tokens"] // 32 - 1)
    await page.click("#requests input[value=newest]")
    for name in (cold, warm):
        await page.until_shows("#request-rows", name[:12])
    everything = await page.text("body")
    for word in ("undefined", "NaN", "[object", "null"):
        assert word not in everything


ASKS_FOR_ALL_TOKENS = """(() => {
  const own = window.fetch;
  window.fetch = (where, more) => own(where, more?.body
    ? { ...more, body: JSON.stringify({ ...JSON.parse(more.body), ignore_eos: true }) } : more);
})()"""


async def test_a_way_shows_while_its_answer_comes(cluster: Cluster, page: Page) -> None:
    await page.value(ASKS_FOR_ALL_TOKENS)  # a model might end before anybody has looked
    await page.value("document.querySelector('#max-tokens').value = '400'")
    await ask(page, "Tell me a very long story of the sea.")
    await page.until(
        "document.querySelector('#steps li:nth-child(6)').dataset.state === 'doing' && "
        "document.querySelector('#steps li:nth-child(7)').dataset.state === 'waiting' && "
        "document.querySelector('.turn.assistant .said').innerText.length > 20",
        timeout_s=ANSWER_TIMEOUT_S,
    )
    await page.until(
        "[...document.querySelectorAll('#worker-rows td:nth-child(4)')]"
        ".some((cell) => cell.innerText === '1')"
    )
    await page.click("#stop")
    await page.until_shows("#steps li:last-child", "cancelled")
    await page.until_shows("#turns", "Stopped.")
