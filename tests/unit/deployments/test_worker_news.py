"""What an ingress makes of its workers' news, against a real router and flow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deployments.flow.flow_types import Effect, Emit, Fail, FlowLimits, Intake, SubmitAttempt
from deployments.flow.request_flow import RequestFlow
from deployments.flow.request_record import RecordStore
from deployments.ingress.worker_news import STALL_TICKS, TICK_S, Heard, WorkerNews, kv_report
from deployments.ingress.worker_views import SILENT_S, WorkerViews
from deployments.links import frames
from kvcache.directory import DirectoryCore
from kvcache.events import (
    BlockStored,
    Cleared,
    EventBatch,
    Snapshot,
    SourceModels,
    StreamDigest,
    digest,
    engine_source,
    slab_source,
)
from router.decision import RouteRequest
from router.route import Router

MODEL = "m"
STALL_S = 20.0


@dataclass(slots=True)
class Output:
    request_id: str
    new_token_ids: list[int] = field(default_factory=lambda: [7])
    finish_reason: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Ingress:
    """Decode workers d1 and d2 and a prefill worker p1, all of node a."""

    def __init__(self) -> None:
        self.router = Router()
        self.flow = RequestFlow(self.router, FlowLimits(worker_deaths_max=1), RecordStore())
        views = WorkerViews(self.router, block_size=32, stall_s=STALL_S)
        self.news = WorkerNews(self.router, self.flow, views, now_s=0.0)
        for name, role in (("d1", "decode"), ("d2", "decode"), ("p1", "prefill")):
            self.news.joined(welcome(name, role), "a", 0.0)

    def submit(self, name: str, prompt_tokens: int = 10) -> SubmitAttempt:
        intake = Intake(name, name, MODEL, prompt_tokens, (), 5, 0, 4096, 0.0, 0.0, None)
        (effect,) = self.flow.submit(intake, 0.0)
        assert isinstance(effect, SubmitAttempt)
        return effect

    def goes_on(self, effects: list[Effect]) -> bool:
        """Whether the one request that was hit was sent elsewhere, not given up."""
        (kind,) = {type(effect) for effect in effects}
        assert kind in {SubmitAttempt, Fail}
        return kind is SubmitAttempt


def welcome(worker: str, role: str) -> frames.Welcome:
    return frames.Welcome(worker, f"{worker}-1", MODEL, role, "a", 1, {}, 4, 64, "kind")


def test_a_silent_member_is_dead_and_counts_against_the_request() -> None:
    ingress = Ingress()
    worker = ingress.submit("r").worker
    effects = ingress.news.lost(worker, "silent", TICK_S, is_member=True)
    assert not ingress.goes_on(effects)


def test_a_worker_that_serve_took_away_is_not_dead() -> None:
    ingress = Ingress()
    worker = ingress.submit("r").worker
    assert ingress.goes_on(ingress.news.lost(worker, "closed", TICK_S, is_member=False))


def test_a_worker_that_serve_took_away_since_its_engine_stood_is_dead() -> None:
    ingress = Ingress()
    worker = ingress.submit("r").worker
    ingress.news.load(worker, frames.Load(stalled_s=STALL_S + 1.0), 0.2)
    assert not ingress.goes_on(ingress.news.lost(worker, "closed", TICK_S, is_member=False))


def test_an_ingress_that_stood_still_calls_nobody_dead() -> None:
    ingress = Ingress()
    worker = ingress.submit("r").worker
    ingress.news.tick(1.0)
    later_s = 1.0 + STALL_TICKS * TICK_S
    assert ingress.goes_on(ingress.news.lost(worker, "silent", later_s, is_member=True))


def test_a_draining_worker_gets_nothing_new_and_comes_back() -> None:
    ingress = Ingress()
    ingress.news.leaves("d1", draining=True)
    assert {ingress.submit(f"r{n}").worker for n in range(4)} == {"d2"}
    ingress.news.leaves("d1", draining=False)
    assert ingress.router.is_ready("d1")


def test_a_worker_that_leaves_is_needed_for_what_it_has_and_where_no_other_is_left() -> None:
    ingress = Ingress()
    busy = ingress.submit("r").worker
    idle = "d2" if busy == "d1" else "d1"
    for name in (busy, idle):
        ingress.news.leaves(name, draining=True)
    assert ingress.news.needs(busy)
    assert not ingress.news.needs(idle), "p1 would serve"
    ingress.news.leaves("p1", draining=True)
    assert ingress.news.needs(idle) and ingress.news.needs("p1")
    ingress.flow.abort(["r"], 0.0, cancelled=True)
    all_three = ("p1", "d1", "d2")
    assert not any(ingress.news.needs(name, more_come=True) for name in all_three)
    intake = Intake("rr", "rr", MODEL, 10, (), 5, 0, 4096, 0.0, 0.0, None)
    assert ingress.flow.submit(intake, 0.0) == [], "it waits for others, and holds nobody up"
    assert not any(ingress.news.needs(name) for name in all_three)
    ingress.flow.abort(["rr"], 0.0, cancelled=True)
    ingress.flow.close(0.0)
    assert all(ingress.news.needs(name, more_come=True) for name in all_three)
    assert not any(ingress.news.needs(name) for name in all_three)


def test_whoever_waits_is_sent_to_the_engine_that_turns_again() -> None:
    ingress = Ingress()
    stuck = frames.Load(stalled_s=STALL_S + 1.0)
    for name in ("d1", "d2", "p1"):
        assert ingress.news.load(name, stuck, 0.0) == Heard([], "stands")
    intake = Intake("r", "r", MODEL, 10, (), 5, 0, 4096, 0.0, 0.0, None)
    assert ingress.flow.submit(intake, 0.0) == [], "it waits"
    assert ingress.news.load("d1", stuck, 0.1) == Heard([])
    heard = ingress.news.outputs("d1", [], [], frames.Load(), 0.2)
    assert heard.engine == "turns"
    (sent,) = heard.effects
    assert isinstance(sent, SubmitAttempt) and sent.worker == "d1"


def listen(ingress: Ingress, seconds: float) -> list[Effect]:
    """Tick for so long, in time."""
    ticks = [ingress.news.tick((n + 1) * TICK_S) for n in range(round(seconds / TICK_S))]
    return [effect for effects in ticks for effect in effects]


def test_a_silent_worker_gets_nothing_new_and_nobody_counts_it_dead_yet() -> None:
    ingress = Ingress()
    worker = ingress.submit("r").worker
    for name in {"d1", "d2", "p1"} - {worker}:
        listen(ingress, SILENT_S / 2)
        ingress.news.load(name, frames.Load(), 0.0)
    assert not ingress.router.is_ready(worker)
    assert worker not in {ingress.submit(f"r{n}").worker for n in range(4)}
    attempt = ingress.flow._requests["r"].attempt
    assert attempt is not None and attempt.worker == worker


def test_while_all_are_silent_requests_wait_for_the_first_that_is_heard() -> None:
    ingress = Ingress()
    assert listen(ingress, SILENT_S) == []
    intake = Intake("r", "r", MODEL, 10, (), 5, 0, 4096, 0.0, 0.0, None)
    assert ingress.flow.submit(intake, 0.0) == [], "it waits"
    heard = ingress.news.load("d2", frames.Load(), 0.1)
    assert heard.engine == "is heard"
    (sent,) = heard.effects
    assert isinstance(sent, SubmitAttempt) and sent.worker == "d2"


def test_an_ingress_that_stood_still_calls_nobody_silent() -> None:
    ingress = Ingress()
    for late_s in (60.0, 120.0, 180.0):  # what came meanwhile may be unread yet
        ingress.news.tick(late_s)
    assert all(ingress.router.is_ready(worker) for worker in ("d1", "d2", "p1"))


def test_a_ping_without_a_load_says_nothing() -> None:
    assert Ingress().news.load("d1", None, 0.0) == Heard([])


def test_a_node_whose_agent_some_worker_misses_hands_nothing_over() -> None:
    ingress = Ingress()
    assert ingress.submit("long", prompt_tokens=900).worker == "p1"
    ingress.news.load("d1", frames.Load(degraded="node agent does not answer"), 0.0)
    assert ingress.submit("longer", prompt_tokens=900).worker != "p1"
    ingress.news.load("d2", frames.Load(degraded="node agent does not answer"), 0.0)
    ingress.news.load("d1", frames.Load(), 0.0)
    assert ingress.submit("as long", prompt_tokens=900).worker != "p1", "d2 still misses it"
    ingress.news.lost("d2", "gone", 0.0, is_member=False)
    assert ingress.router._no_handoff == set(), "whoever missed it is gone"


def test_outputs_reach_the_flow_with_their_reports_and_timings() -> None:
    ingress = Ingress()
    sent = ingress.submit("r")
    output = Output(sent.attempt, kv_transfer_params={"headwater": {"loaded_blocks": 3, "new": 1}})
    timing = frames.Timing(sent.attempt, 0.1, 0.2, 0.0)
    heard = ingress.news.outputs(sent.worker, [output], [timing], frames.Load(running=1), 0.5)
    assert heard == Heard([Emit("r", output, finish=False)])
    attempt = ingress.flow._requests["r"].attempt
    assert attempt is not None and attempt.kv is not None and attempt.timing is not None
    assert (attempt.kv.loaded_blocks, attempt.timing.compute_s) == (3, 0.2)


def test_a_missed_batch_of_an_engine_asks_for_all_until_that_comes() -> None:
    ingress = Ingress()
    source = engine_source("d1")
    stored = (BlockStored(b"x" * 32, None, MODEL),)
    assert not ingress.news.cache_changed(Snapshot(source, "1", 0, MODEL, ()))
    assert not ingress.news.cache_changed(EventBatch(source, "1", 1, MODEL, stored))
    assert ingress.news.cache_changed(EventBatch(source, "1", 3, MODEL, ()))
    assert ingress.news.unresolved() == ["d1"]
    assert not ingress.news.cache_changed(Snapshot(source, "1", 3, MODEL, (b"x" * 32,)))
    assert ingress.news.unresolved() == []


PROMPT = tuple(bytes([n]) * 32 for n in range(1, 11))


def decision(ingress: Ingress) -> Any:
    return ingress.router.route(RouteRequest("r", MODEL, 325, PROMPT), 0.0)


def test_an_engine_whose_digest_differs_is_asked_for_all_and_not_counted_on_meanwhile() -> None:
    ingress = Ingress()
    source = engine_source("d1")
    stored = tuple(BlockStored(name, None, MODEL) for name in PROMPT)
    ingress.news.cache_changed(EventBatch(source, "1", 1, MODEL, stored))
    right = StreamDigest(source, "1", 1, MODEL, len(PROMPT), digest(PROMPT), 1)
    assert not ingress.news.cache_changed(right)
    known = decision(ingress)
    assert (known.decode, known.prefill, known.cached_tokens) == ("d1", None, 320)
    held = PROMPT[:4]  # it has evicted the others, and never said so
    wrong = StreamDigest(source, "1", 1, MODEL, len(held), digest(held), 2)
    assert ingress.news.cache_changed(wrong)
    assert ingress.news.unresolved() == ["d1"]
    by_load = decision(ingress)
    assert (by_load.cached_tokens, by_load.prefix_information) == (0, "degraded")
    assert ingress.router.fallbacks_total["engine_in_doubt"] == 1
    assert not ingress.news.cache_changed(Snapshot(source, "1", 1, MODEL, held))
    assert decision(ingress).prefix_information == "exact"
    assert ingress.router.index.match(MODEL, PROMPT) == {source: 4}
    assert ingress.router.index.counters.digests_differ_total == 1


def test_a_worker_that_drops_its_whole_cache_is_looked_up_no_more() -> None:
    # DIR-03: an index that ignores the reset points at blocks that are gone.
    ingress = Ingress()
    source = engine_source("d1")
    stored = tuple(BlockStored(name, None, MODEL) for name in PROMPT)
    ingress.news.cache_changed(EventBatch(source, "1", 1, MODEL, stored))
    assert decision(ingress).cached_tokens == 320
    assert not ingress.news.cache_changed(EventBatch(source, "1", 2, MODEL, (Cleared(MODEL),)))
    assert ingress.router.index.match(MODEL, PROMPT) == {}
    assert ingress.router.index.blocks(MODEL) == 0
    assert decision(ingress).cached_tokens == 0
    nothing = StreamDigest(source, "1", 2, MODEL, 0, 0, 1)
    assert not ingress.news.cache_changed(nothing), "and its digest says the same"


def test_a_restarted_engine_is_not_looked_up_for_what_its_last_life_held() -> None:
    ingress = Ingress()
    source = engine_source("d1")
    stored = tuple(BlockStored(name, None, MODEL) for name in PROMPT)
    ingress.news.cache_changed(EventBatch(source, "1", 1, MODEL, stored))
    ingress.news.lost("d1", "gone", 0.0, is_member=True)
    assert ingress.router.index.match(MODEL, PROMPT) == {}
    ingress.news.joined(welcome("d1", "decode"), "a", 0.0)
    ingress.news.cache_changed(Snapshot(source, "2", 0, MODEL, ()))
    assert decision(ingress).cached_tokens == 0


def test_what_this_ingress_knows_wrongly_of_a_slab_is_asked_of_the_directory_alone() -> None:
    ingress = Ingress()
    source, index = slab_source("a"), ingress.router.index
    core = DirectoryCore("epoch-1")
    ingress.news.directory_said(core.events_since(None))
    stored = tuple(BlockStored(name, None, MODEL) for name in PROMPT)
    core.apply(EventBatch(source, "1", 1, MODEL, stored))
    ingress.news.directory_said(core.events_since(index.cursor))
    index._core._streams[source, MODEL].digest ^= 1
    core.apply_digest(StreamDigest(source, "1", 1, MODEL, len(PROMPT), digest(PROMPT), 1))
    ingress.news.directory_said(core.events_since(index.cursor))
    assert list(index.wanted) == [(source, MODEL)]
    assert index.match(MODEL, PROMPT) == {}
    assert ingress.news.unresolved() == [], "no worker is asked"
    for wanted in index.wanted:
        core.tell_again(*wanted)
    ingress.news.directory_said(core.events_since(index.cursor))
    assert index.match(MODEL, PROMPT) == {source: len(PROMPT)}
    assert not index.wanted
    index.validate()


def test_a_worker_does_not_speak_for_a_node() -> None:
    ingress = Ingress()
    assert not ingress.news.cache_changed(SourceModels(engine_source("d1"), "2", ()))


def test_an_unknown_key_in_a_report_is_left_out() -> None:
    assert kv_report({"headwater": {"computed_tokens": 4, "of_a_newer_version": 1}}) == kv_report(
        {"headwater": {"computed_tokens": 4}}
    )
