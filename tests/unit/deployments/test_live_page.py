"""The live page's routes: its files with their headers, and the list of requests."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deployments.edge.live_page import (
    COUNT_MAX,
    LIVE_PATH,
    TRACES_LOOKED_AT,
    mount_live_page,
    page_files,
    recent_requests,
)
from deployments.flow.flow_types import Outcome
from deployments.flow.request_record import RecordStore, RequestRecord
from tests.unit.deployments.record_examples import finished, lost, prefill, record

NOW_S = 12.0  # the examples begin at 10 s


def store(**records: RequestRecord) -> RecordStore:
    made = RecordStore()
    for name, one in records.items():
        one.trace_id = name
        made.add(one)
    return made


def waiting(request_id: str = "r") -> RequestRecord:
    """Submitted, without a token yet."""
    return record(prefill(first_s=None), request_id=request_id)


def refused() -> RequestRecord:
    return record(ended_s=11.0, outcome=Outcome.REFUSED, detail="no_worker: none came")


async def get(
    path: str, records: RecordStore | None = None, if_none_match: str = ""
) -> httpx.Response:
    app = FastAPI()
    mount_live_page(app, records or RecordStore(), lambda: NOW_S)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
        return await client.get(path, headers={"if-none-match": if_none_match})


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["trace_id"] for row in rows]


# ---- files ----------------------------------------------------------------------------------


async def test_the_page_and_each_of_its_files_is_served_with_its_type() -> None:
    page = await get(LIVE_PATH)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>Headwater live</title>" in page.text
    types = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    others = [name for name in page_files() if name != "page.html"]
    assert {name.rpartition(".")[2] for name in others} == set(types)
    for name in others:
        answer = await get(f"{LIVE_PATH}/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(types[name.rpartition(".")[2]])
        assert answer.content == page_files()[name].content
    assert (await get(f"{LIVE_PATH}/page.html")).status_code == 404
    assert (await get(f"{LIVE_PATH}/..%2flive_page.py")).status_code == 404


async def test_a_browser_may_load_and_ask_nothing_but_this_server() -> None:
    policy = dict(
        part.strip().partition(" ")[::2]
        for part in (await get(LIVE_PATH)).headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    refused = ("base-uri", "form-action", "frame-ancestors", "trusted-types")
    assert {policy[name] for name in refused} == {"'none'"}
    assert policy["require-trusted-types-for"] == "'script'"


def test_nothing_in_the_files_is_inline_or_from_elsewhere() -> None:
    text = {name: file.content.decode() for name, file in page_files().items()}
    page = text["page.html"]
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", page) == []
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {
        f"live/{name}" for name in ("icon.svg", "page.css", "page.js")
    }
    for name, content in text.items():
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", content) == [], name
    scripts = "".join(content for name, content in text.items() if name.endswith(".js"))
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in scripts
    assert re.findall(r"localStorage|sessionStorage|document\.cookie|indexedDB", scripts) == []


async def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    first = await get(f"{LIVE_PATH}/page.css")
    again = await get(f"{LIVE_PATH}/page.css", if_none_match=first.headers["etag"])
    other = await get(f"{LIVE_PATH}/page.css", if_none_match='"old"')
    weak = await get(f"{LIVE_PATH}/page.css", if_none_match=f'"old", W/{first.headers["etag"]}')
    assert weak.status_code == 304
    assert (again.status_code, again.content) == (304, b"")
    assert (other.status_code, other.content) == (200, first.content)
    assert first.headers["cache-control"] == again.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_below_the_page_can_be_changed(method: str) -> None:
    app = FastAPI()
    mount_live_page(app, RecordStore())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
        for path in (LIVE_PATH, f"{LIVE_PATH}/page.js", f"{LIVE_PATH}/requests"):
            assert (await client.request(method, path)).status_code == 405


# ---- requests -------------------------------------------------------------------------------


def test_the_slowest_come_first_and_those_that_still_wait_count_up_to_now() -> None:
    slow = finished()
    slow.delivered_s = 13.0  # 3 s, more than the 2 s for which the waiting one has waited
    records = store(quick=finished(), waits=waiting(), slow=slow)
    found = recent_requests(records, NOW_S, count=10)
    assert names(found["slowest"]) == ["slow", "waits", "quick"]
    assert names(found["newest"]) == ["slow", "waits", "quick"]
    assert [round(row["waited_ms"]) for row in found["slowest"]] == [3000, 2000, 320]
    assert [row["has_token"] for row in found["slowest"]] == [True, False, True]


def test_what_ended_without_a_token_is_not_slow_but_among_the_newest() -> None:
    found = recent_requests(store(refused=refused()), NOW_S, count=10)
    (row,) = found["newest"]
    assert found["slowest"] == []
    assert (row["outcome"], row["detail"]) == ("refused", "no_worker: none came")
    assert row["waited_ms"] is row["most"] is None
    assert row["workers"] == []


def test_a_row_says_which_part_took_most_and_where_the_request_was() -> None:
    (row,) = recent_requests(store(one=finished()), NOW_S, count=1)["newest"]
    assert row["most"] == {"part": "prefill", "ms": 200.0}
    assert row["workers"] == ["p1", "d1"]
    assert (row["prompt_tokens"], row["output_tokens"], row["age_s"]) == (800, 5, 2.0)


def test_a_request_that_was_moved_says_all_its_workers() -> None:
    moved = record(lost(), prefill(at_s=10.2, first_s=10.5), first_token_s=10.5)
    (row,) = recent_requests(store(moved=moved), NOW_S, count=1)["newest"]
    assert row["workers"] == ["p0", "p1"]


def test_of_several_answers_to_one_request_the_slowest_is_shown() -> None:
    records = RecordStore()
    for one in (finished(), waiting(), finished()):
        records.add(one)
    (row,) = recent_requests(records, NOW_S, count=5)["newest"]
    assert (row["choices"], row["has_token"]) == (3, False)


def test_a_request_is_found_by_the_name_that_its_client_gave_it() -> None:
    records = store(a=waiting("chatcmpl-live-1-x"), b=waiting("chatcmpl-live-2-y"))
    assert recent_requests(records, NOW_S, count=0, named="live-1-")["named"] == "a"
    assert recent_requests(records, NOW_S, count=0, named="live-2-")["named"] == "b"
    assert recent_requests(records, NOW_S, count=0, named="live-3-")["named"] is None
    assert recent_requests(records, NOW_S, count=0)["named"] is None


def test_a_look_is_bounded_however_much_is_kept_or_asked_for() -> None:
    records = RecordStore()
    for number in range(TRACES_LOOKED_AT + 50):
        one = finished()
        one.trace_id = str(number)
        records.add(one)
    found = recent_requests(records, NOW_S, count=10_000)
    assert found["looked_at"] == TRACES_LOOKED_AT
    assert len(found["slowest"]) == len(found["newest"]) == COUNT_MAX
    assert recent_requests(records, NOW_S, count=-1)["newest"] == []


async def test_the_list_is_json_that_nobody_keeps() -> None:
    answer = await get(f"{LIVE_PATH}/requests?count=1", store(one=finished()))
    assert names(answer.json()["slowest"]) == ["one"]
    assert answer.headers["cache-control"] == "no-store"
    assert (await get(f"{LIVE_PATH}/requests?count=some")).status_code == 422
