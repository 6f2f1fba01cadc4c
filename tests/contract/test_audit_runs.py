"""The shell of shadow audits: what goes over a link for one, and what becomes of its outputs.

No engine runs here; requests and outputs are vLLM's own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from deployments.flow.flow_types import Intake, KvReport, Outcome, Role
from deployments.flow.request_record import AttemptRecord, RecordStore, RequestRecord
from deployments.flow.shadow_audit import AuditOutcome, AuditSettings
from deployments.ingress.worker_views import WorkerState
from deployments.links import frames

pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore")]

TOKENS = (7, 8, 9)
READY = [WorkerState("d1", "decode", "ready"), WorkerState("d2", "decode", "stalled", "stuck")]


@dataclass
class Link:
    load: frames.Load = field(default_factory=frames.Load)


class World:
    """One ingress's audits, and all that they sent."""

    def __init__(self) -> None:
        from deployments.ingress.audit_runs import AuditRuns

        self.sent: list[tuple[str, frames.Message]] = []
        self.links = {"d1": Link(), "d2": Link()}
        self.runs = AuditRuns(
            AuditSettings(share=1.0),
            32,
            lambda worker, message: self.sent.append((worker, message)),
            lambda _attempt, _what: None,
        )
        self.records = RecordStore()
        self.records.on_end = self.runs.core.consider

    def finish(self, request: Any) -> None:
        """A request that had loaded a block ends, as the flow tells the records."""
        intake = Intake(
            request_id="r1", trace_id="t1", model="m", prompt_tokens=40, block_hashes=(b"b" * 32,),
            max_tokens=3, min_tokens=0, context_tokens_max=512, received_s=0.0, tokenised_s=0.0,
            payload=request,
        )  # fmt: skip
        record = RequestRecord.of(intake)
        record.outcome, record.ended_s = Outcome.FINISHED, time.monotonic()
        kv = KvReport(loaded_tokens=32, loaded_blocks=1)
        record.attempts.append(AttemptRecord("r1~1", "d1", Role.DECODE, "new", 0.0, 0, kv=kv))
        self.records.ended(intake, record, TOKENS)

    def tick(self, in_flight: int = 0) -> None:
        self.runs.tick(READY, self.links, [in_flight], time.monotonic())

    def submitted(self) -> frames.Submit:
        """The audit that was sent last."""
        worker, message = self.sent[-1]
        assert worker == "d1"
        assert isinstance(message, frames.Submit)
        return message


def request() -> Any:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    params = SamplingParams(temperature=0.0, max_tokens=3, stop=["."], seed=4)
    params.watermarking = False  # as vLLM's front end leaves it
    return EngineCoreRequest(
        request_id="r1", prompt_token_ids=list(range(40)), mm_features=None,
        sampling_params=params, pooling_params=None, arrival_time=0.0, lora_request=None,
        cache_salt="salt", data_parallel_rank=None,
    )  # fmt: skip


def output(name: str, token: int, *, finish: bool = False) -> Any:
    """One output token, with the log probabilities that an audit asks for."""
    import numpy as np
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists

    rows = LogprobsLists(np.array([[token, 99]]), np.array([[-0.1, -4.0]]), np.array([1]))
    reason = FinishReason.LENGTH if finish else None
    return EngineCoreOutput(name, [token], new_logprobs=rows, finish_reason=reason)


def test_an_audit_asks_for_the_same_prompt_without_reuse_under_a_name_of_its_own() -> None:
    from deployments.engine.codec import decode_request

    world, asked = World(), request()
    world.finish(asked)
    world.tick(in_flight=1)
    assert world.sent == []
    world.tick()
    sent = world.submitted()
    assert sent.is_audit and sent.handoff is None and not sent.pull_from
    crossed = decode_request(sent.request)
    assert crossed.request_id == sent.attempt == "audit~r1~1"
    assert (crossed.prompt_token_ids, crossed.cache_salt) == (asked.prompt_token_ids, "salt")
    params = crossed.sampling_params
    assert params is not None
    assert params.skip_reading_prefix_cache and params.ignore_eos
    assert (params.temperature, params.max_tokens, params.stop) == (0.0, 3, [])
    assert asked.sampling_params.stop == ["."], "the user's own request is as it was"


def test_outputs_of_audits_are_compared_and_go_to_nobody() -> None:
    world = World()
    world.finish(request())
    users = [output("r2~1", 5)]
    assert world.runs.users_of(users) is users, "no audit yet: nothing is looked at"
    world.tick()
    name = world.submitted().attempt
    for place, token in enumerate(TOKENS):
        mixed = [output("r2~1", 5), output(name, token, finish=place == 2)]
        assert [one.request_id for one in world.runs.users_of(mixed)] == ["r2~1"]
    assert world.runs.core.outcomes[AuditOutcome.AGREED] == 1
    assert world.runs.users_of([output(name, 1)]) == [], "what comes late, too"


def test_a_users_request_ends_the_audit_at_its_worker_before_it_is_sent() -> None:
    world = World()
    world.finish(request())
    world.tick()
    name = world.submitted().attempt
    world.runs.before_submit("d2")
    assert len(world.sent) == 1
    world.runs.before_submit("d1")
    assert world.sent[1:] == [("d1", frames.Abort([name]))]
    world.links["d1"].load = frames.Load(running=1)
    world.tick()
    assert len(world.sent) == 2, "the user's request runs there now"
