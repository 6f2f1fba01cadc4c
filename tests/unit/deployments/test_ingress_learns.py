"""What the ingress gives the cost model of a worker's report on blocks."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

from deployments.flow.flow_types import FlowLimits, KvReport
from deployments.flow.request_flow import RequestFlow
from deployments.flow.request_record import RecordStore
from deployments.ingress.worker_news import WorkerNews, kv_report
from deployments.ingress.worker_views import WorkerViews
from deployments.links import frames
from router.route import Router


class Learner:
    """The router's end."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, int, float]] = []
        self.pulls: list[tuple[str, int, float]] = []

    def observe_load(self, worker: str, blocks: int, ms: float) -> None:
        self.loads.append((worker, blocks, round(ms, 6)))

    def observe_pull(self, worker: str, blocks: int, ms: float) -> None:
        self.pulls.append((worker, blocks, round(ms, 6)))


def learned_of(*reports: KvReport) -> Learner:
    learner, router = Learner(), Router()
    flow = RequestFlow(router, FlowLimits(), RecordStore())
    views = WorkerViews(router, block_size=32, stall_s=20.0)
    news = WorkerNews(learner, flow, views, 0.0)  # type: ignore[arg-type]
    outputs = [
        SimpleNamespace(
            request_id=f"r{number}",
            new_token_ids=[1],
            finish_reason=None,
            kv_transfer_params={"headwater": asdict(report)},
        )
        for number, report in enumerate(reports)
    ]
    news.outputs("d1", outputs, [], frames.Load(), 0.0)
    return learner


def test_a_load_and_the_pull_within_it_are_samples_apart() -> None:
    both = KvReport(loaded_blocks=24, pulled_blocks=22, load_s=0.013, pull_s=0.012)
    learned = learned_of(both)
    assert learned.loads == [("d1", 2, 1.0)]
    assert learned.pulls == [("d1", 22, 12.0)]


def test_each_alone_is_a_sample_of_its_own_kind() -> None:
    pulled = KvReport(loaded_blocks=22, pulled_blocks=22, load_s=0.012, pull_s=0.012)
    loaded = KvReport(loaded_blocks=5, load_s=0.004)
    assert learned_of(pulled).loads == learned_of(loaded).pulls == []
    assert learned_of(pulled).pulls == [("d1", 22, 12.0)]
    assert learned_of(loaded).loads == [("d1", 5, 4.0)]


def test_what_failed_on_the_way_or_did_not_happen_teaches_nothing() -> None:
    failed = KvReport(loaded_blocks=9, pulled_blocks=9, load_s=5.0, pull_s=5.0, failed_blocks=1)
    learned = learned_of(failed, KvReport(computed_tokens=800))
    assert learned.loads == learned.pulls == []


def test_the_connectors_report_is_read_and_newer_keys_are_left_out() -> None:
    told = {"headwater": {"pulled_blocks": 3, "pull_s": 0.5, "pull_failure": None, "newer": 1}}
    assert kv_report(told) == KvReport(pulled_blocks=3, pull_s=0.5)
