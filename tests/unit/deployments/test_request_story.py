import json
from dataclasses import replace

from deployments.flow.flow_types import Outcome
from deployments.flow.request_story import as_json, story
from tests.unit.deployments.record_examples import (
    candidate,
    decision,
    decode,
    finished,
    lost,
    prefill,
    pulled,
    record,
)


def test_the_story_of_a_typical_request() -> None:
    plan, best, other, first, second, ttft, end = story([finished()]).splitlines()[1:]
    assert story([finished()]).startswith("800 prompt tokens for m.\n")
    assert plan == (
        "Decision: prefill on p1, then decode on d1 (cheapest); 64 tokens known to be cached, "
        "first token predicted after 225 ms."
    )
    assert best == (
        "  p1 > d1: 225 ms = queue 1 + compute 210 + load 2 + hand-off 3 + decode 4 "
        "+ delay to others 5"
    )
    assert other.startswith("  - > d1: 315 ms = queue 1 + compute 300")
    assert first == (
        "1. at 0.005 s to p1 as prefill (new): 1 tokens, handed over; loaded 0 blocks, "
        "computed 800 tokens, published 25 blocks."
    )
    assert second == (
        "2. at 0.300 s to d1 as decode (hand-over, with 1 tokens made before): 4 tokens, "
        "finished; loaded 24 blocks, computed 37 tokens, published 0 blocks."
    )
    assert ttft == (
        "First token after 320 ms: tokenise 5.0, queue 20.0, prefill 200.0, publish 10.0, "
        "hand-over 0.0, delivery 85.0."
    )
    assert end == "Finished after 1.00 s, 5 tokens."


def test_a_lost_worker_is_told_with_its_reason() -> None:
    second = prefill(at_s=10.2, first_s=10.5)
    text = story([record(lost(), second, first_token_s=10.5)])
    assert "1. at 0.005 s to p0 as prefill (new): 0 tokens, lost: silent for 10 s." in text
    assert "2. at 0.200 s to p1" in text
    assert text.endswith("Still running.")


def test_a_refusal_is_told_with_its_reason() -> None:
    text = story([record(ended_s=12.0, outcome=Outcome.REFUSED, detail="no_worker: none came")])
    assert text.endswith("Refused after 2.00 s, 0 tokens (no_worker: none came).")


def test_a_request_on_one_worker_is_told_as_such() -> None:
    text = story([record(decisions=[decision(candidate(None, "d1", 10.0), alone=True)])])
    assert "Decision: all of it on d1 (cheapest)" in text


def test_doubts_of_the_directory_are_told() -> None:
    text = story([record(decisions=[decision(degraded=("slab:a", "engine:d1"))])])
    assert "The directory was not sure of slab:a, engine:d1: their blocks did not count." in text


def test_blocks_that_failed_to_load_are_told() -> None:
    text = story([record(prefill(), decode(failed_blocks=2))])
    assert ", 2 blocks failed to load and were recomputed." in text


def test_pulled_blocks_are_told_with_the_node_that_gave_them() -> None:
    text = story([record(prefill(), pulled(22))])
    assert (
        "finished; loaded 24 blocks, 22 of them pulled from node node-a in 12 ms, computed 37 "
        "tokens" in text
    )
    assert "pulled" not in text.partition("2. at")[0]


def test_blocks_that_came_before_the_hand_over_are_told_too() -> None:
    second = pulled(4)
    assert second.kv is not None
    second.kv = replace(second.kv, prefetched_blocks=20)
    text = story([record(prefill(), second)])
    assert "4 of them pulled from node node-a in 12 ms, 20 while it computed them, co" in text


def test_a_pull_that_gave_nothing_is_told() -> None:
    assert "loaded 2 blocks, 0 of them pulled from node node-a, computed" in story(
        [record(prefill(), pulled(0))]
    )
    text = story([record(prefill(), pulled(0, failure="unreachable"))])
    assert "0 of them pulled from node node-a (pull ended early: unreachable), computed" in text


def test_a_decision_to_pull_is_told() -> None:
    text = story([record(decisions=[decision(pull_from="node-a")])])
    assert "Blocks that its own node has not come from node node-a." in text
    assert "come from node" not in story([record(decisions=[decision()])])


def test_only_the_best_four_candidates_are_told() -> None:
    many = [candidate("p1", f"d{number}", 1.0) for number in range(9)]
    text = story([record(decisions=[decision(*many)])])
    assert "p1 > d3" in text
    assert "p1 > d4" not in text


def test_several_answers_to_one_request_are_told_one_after_the_other() -> None:
    text = story([finished(), record()])
    assert "Choice 1 of 2:" in text
    assert text.index("Choice 2 of 2:") > text.index("Finished")
    assert story([]) == ""


def test_the_record_as_json_counts_seconds_from_when_the_request_was_received() -> None:
    body = json.loads(json.dumps(as_json(finished())))
    assert body["request_id"] == "r"
    assert body["trace_id"] == "trace"
    assert body["outcome"] == "finished"
    assert body["duration_s"] == 1.0
    assert round(body["ttft"]["total_ms"]) == 320
    assert body["decisions"][0]["candidates"][0]["terms"]["compute_ms"] == 210.0
    first, second = body["attempts"]
    assert (first["role"], round(first["submitted_s"], 3)) == ("prefill", 0.005)
    assert round(second["first_output_s"], 3) == 0.4
    assert second["kv"]["loaded_blocks"] == 24
    assert (first["pull_from"], second["pull_from"]) == ("", "")


def test_the_record_as_json_tells_what_was_pulled() -> None:
    (attempt,) = json.loads(json.dumps(as_json(record(pulled(22)))))["attempts"]
    assert (attempt["pull_from"], attempt["kv"]["pulled_blocks"]) == ("node-a", 22)
    assert attempt["kv"]["pull_s"] == 0.012


def test_the_record_as_json_tells_what_its_engine_had_cached() -> None:
    body = as_json(record(prefill(), cached_tokens=96, local_cached_tokens=64))
    assert (body["cached_tokens"], body["local_cached_tokens"]) == (96, 64)


def test_the_record_of_a_request_that_has_only_begun_is_json_too() -> None:
    body = json.loads(json.dumps(as_json(record(lost()))))
    assert body["ttft"] is body["duration_s"] is body["outcome"] is None
    assert body["attempts"][0]["first_output_s"] is None
