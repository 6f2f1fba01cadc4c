"""The counting engine does what a run's prompts ask for, and its clients can tell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loadtests.micro.counting import CREDITS_ENV, WORD_TOKENS, credit, prompt_of, text_of
from loadtests.micro.counting_steps import Counter
from loadtests.micro.tokens_client import _Stream
from loadtests.micro.tokens_report import Row, Table, section_of


def tokens_of(counter: Counter) -> dict[str, list[int]]:
    return {output.request_id: output.new_token_ids for output in counter.step()}


def test_a_step_makes_the_next_token_of_each_request() -> None:
    counter = Counter()
    for name, made in (("a", 0), ("b", 9)):
        counter.add(name, prompt_of(2, window_steps=0), wanted=20, made=made)
    assert tokens_of(counter) == {"a": [WORD_TOKENS[0]], "b": [WORD_TOKENS[9]]}
    assert tokens_of(counter) == {"a": [WORD_TOKENS[1]], "b": [WORD_TOKENS[0]]}


def test_no_token_is_made_before_the_run_is_complete_and_none_after_its_end() -> None:
    counter = Counter()
    counter.add("a", prompt_of(2, window_steps=0), wanted=2)
    assert counter.step() == []
    counter.add("b", prompt_of(2, window_steps=0), wanted=1)
    assert [output.finish_reason is not None for output in counter.step()] == [False, True]
    assert [output.finish_reason is not None for output in counter.step()] == [True]
    assert len(counter) == 0


def test_a_request_that_is_dropped_makes_no_more_tokens() -> None:
    counter = Counter()
    for name in "ab":
        counter.add(name, prompt_of(2, window_steps=0), wanted=9)
    counter.step()
    counter.drop("a")
    assert list(tokens_of(counter)) == ["b"]


def test_credit_for_what_arrived_lets_the_next_step_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "credits"
    os.mkfifo(fifo)
    monkeypatch.setenv(CREDITS_ENV, str(fifo))
    counter = Counter()
    client = os.open(fifo, os.O_RDWR)
    try:
        counter.add("a", prompt_of(1), wanted=1000)
        for _ in range(300):
            assert len(counter.step()) == 1
            assert counter.outstanding == 1
            credit(client, 1)
    finally:
        os.close(client)


def test_the_clients_count_words_however_the_bytes_are_cut() -> None:
    event = b'data: {"choices":[{"text":" one two"}]}\n\n'
    stream = _Stream()
    assert stream.take(event) == 2
    assert stream.take(event + b"data: [DONE]\n\n") == 2
    assert "".join(stream.events()) == " one two one two"
    assert text_of(11).split()[:2] == ["one", "two"]


def test_a_stream_that_breaks_off_is_no_answer() -> None:
    stream = _Stream()
    stream.take(b'data: {"choices":[{"text":" one"}]}\n\n')
    with pytest.raises(ValueError, match="ended with"):
        stream.events()


def test_a_missed_target_is_said_in_its_row_and_of_the_section() -> None:
    table = Table("Rate, n = 3", ("n", "target"), [Row(("1",), (">= 2", False)), Row(("2",), None)])
    section = section_of([table], ["n = 3"])
    assert section.missed == ("Rate: 1, >= 2",)
    assert section.tables[0].rows == (("1", ">= 2 MISSED"), ("2", ""))
    assert "**Rate, n = 3**" in section.tables[0].lines()
