from __future__ import annotations

from typing import Any

import pytest

from loadtests.lessons import chunked_prefill
from loadtests.lessons.virtual_client import Played
from loadtests.load.records import Chunk, Outcome, Sample
from loadtests.plots import svg
from tests.unit.loadtests.lessons.simulated_engine import SimulatedBench


def _round(setting: str, gap_ms: float, ttft_ms: float, tpot_ms: float) -> dict[str, Any]:
    return {
        "setting": setting,
        "longest_gap_ms": gap_ms,
        "gaps": 8,
        "others_tpot_ms": tpot_ms,
        "long_ttft_ms": ttft_ms,
        "tokens_at_s": [-0.5, -0.1, 0.2, 0.4],
    }


def _data(
    off: tuple[float, float, float], small: tuple[float, float, float], weather: float = 0.01
) -> Any:
    rounds = []
    for factor in (1 - weather, 1.0, 1 + weather):
        for setting, values in (
            ("off", off),
            ("1024", (off[0] * 0.9, off[1] * 0.98, off[2])),
            ("64", small),
        ):
            rounds.append(_round(setting, *(value * factor for value in values)))
    return {"long_tokens": 1500, "streams": 4, "stream_output_tokens": 64, "rounds": rounds}


def test_others_gain_and_the_prompt_pays() -> None:
    others, prompt = chunked_prefill.reading(_data((1500, 1600, 50), (90, 2600, 60)))
    assert "a prompt of 1500 tokens came in, the longest gap of 4 streams was 90 ms" in others
    assert "with a budget of 64 tokens and 1500 ms without chunked prefill (n = 3" in others
    assert "their TPOT was higher, 60.0 ms against 50.0 ms" in others
    assert "The long prompt pays: its first token came after 2600 ms" in prompt
    assert "1.6 times as long; it was served soonest, after 1568 ms with a budget of 1024" in prompt


def test_the_contrary_is_told() -> None:
    others, prompt = chunked_prefill.reading(
        _data((1500, 1600, 50), (4000, 400, 40)) | {"rounds": _contrary()}
    )
    assert "was longer with chunked prefill, contrary to the textbook: 4000 ms" in others
    assert "their TPOT was lower" in others
    assert "does not pay, it gains: 400 ms at a budget of 64" in prompt
    assert "soonest it came after 400 ms with a budget of 64" in prompt


def _contrary() -> list[dict[str, Any]]:
    return [
        _round(setting, gap_ms * factor, ttft_ms * factor, tpot_ms * factor)
        for factor in (0.99, 1.0, 1.01)
        for setting, gap_ms, ttft_ms, tpot_ms in (("off", 1500, 1600, 50), ("64", 4000, 400, 40))
    ]


def test_no_difference_is_told_as_such() -> None:
    others, prompt = chunked_prefill.reading(_data((100, 1600, 50), (85, 1610, 50), weather=0.2))
    assert "at best: effect not seen" in others
    assert "TPOT shows no difference (50.0 ms against 50.0 ms)" in others
    assert "For the long prompt's own TTFT effect not seen" in prompt


def _sample(index: int, marks: list[float], sent_s: float = 0.0, group: str = "") -> Sample:
    return Sample(
        index=index,
        group=group,
        due_s=sent_s,
        sent_s=sent_s,
        ended_s=marks[-1],
        outcome=Outcome.OK,
        chunks=tuple(Chunk(at_s, 1) for at_s in marks),
        output_tokens=len(marks),
    )


def test_only_gaps_that_the_long_prompt_can_have_made_count() -> None:
    stream = _sample(0, [1.0, 5.0, 6.0, 8.0, 9.0, 19.0])
    long = _sample(1, [8.0, 8.5], sent_s=5.5, group="long")
    found = chunked_prefill.round_of("off", Played((stream, long), ()))
    # Not 4 s before it came, nor 1 and 10 s after its first token.
    assert found["longest_gap_ms"] == pytest.approx(2000.0)
    assert found["gaps"] == 2
    assert found["long_ttft_ms"] == pytest.approx(2500.0)
    assert found["tokens_at_s"] == pytest.approx([-4.5, -0.5, 0.5, 2.5, 3.5, 13.5])


@pytest.mark.parametrize("quick", [True, False])
def test_on_an_engine_of_the_textbook_small_budgets_shorten_gaps_and_lengthen_ttft(
    *, quick: bool
) -> None:
    bench = SimulatedBench(quick=quick)
    data = chunked_prefill.measure(bench)
    others, prompt = chunked_prefill.reading(data)
    # A step of 4 streams and 60 tokens of the prompt: 20 + 60 + 4 ms.
    assert "was 84 ms with a budget of 64 tokens" in others
    assert "The long prompt pays" in prompt
    assert len(data["rounds"]) == (2 * 4 if quick else 3 * 7)
    assert any("off" in line for line in bench.said)
    for drawn in chunked_prefill.plots(data):
        assert svg(drawn)


def test_without_chunked_prefill_the_prompt_is_one_step() -> None:
    data = chunked_prefill.measure(SimulatedBench())
    off = [each for each in data["rounds"] if each["setting"] == "off"]
    tokens = chunked_prefill.LONG_TOKENS_QUICK
    assert {round(each["longest_gap_ms"]) for each in off} == {20 + tokens + 4}
