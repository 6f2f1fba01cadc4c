from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests.load import workload_flags as flags
from loadtests.load.lengths import Fixed, Uniform
from loadtests.load.token_prompts import TokenIds, Words
from loadtests.load.workloads import SHAPES, WORKLOADS, Shape


def parsed(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_arguments(parser)
    return parser.parse_args(words.split())


@pytest.mark.parametrize("name", WORKLOADS)
def test_without_flags_a_workload_has_its_usual_shape_and_the_servers_context(name: str) -> None:
    arguments = parsed(f"--workload {name}")
    assert flags.shape_of(arguments) == SHAPES[name]
    assert flags.shape_of(arguments, 2048) == replace(SHAPES[name], context_most=2048)


def test_flags_change_the_shape() -> None:
    arguments = parsed(
        "--workload agents --input-tokens uniform:5:9 --output-tokens 3 --prefixes 7 "
        "--prefix-tokens 0 --turns 2 --think-s 0.25 --max-context 100"
    )
    expected = Shape(Uniform(5, 9), Fixed(3), 7, 0, Fixed(2), 0.25, 100)
    assert flags.shape_of(arguments, 2048) == expected
    assert flags.conditions(arguments, expected, Words()) == {
        "workload": "agents",
        "input_tokens": "uniform:5:9",
        "output_tokens": "3",
        "prefixes": 7,
        "prefix_tokens": 0,
        "turns": "2",
        "think_s": 0.25,
        "context_most": 100,
        "prompts": "text, about one token a word",
        "seed": 1,
    }


def test_a_flag_that_the_workload_does_not_read_is_refused() -> None:
    with pytest.raises(ValueError, match="workload random takes no --prefixes, --think-s"):
        flags.shape_of(parsed("--think-s 3 --prefixes 2"))
    with pytest.raises(ValueError, match="shared_prefix takes no --turns"):
        flags.shape_of(parsed("--workload shared_prefix --turns 2"))


def test_prompts_are_what_the_flags_say_and_else_the_served_models_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5000}))
    card = {"root": str(tmp_path)}
    assert flags.vocabulary_of(parsed(""), card) == TokenIds(1000, 3999)
    assert flags.vocabulary_of(parsed("--vocabulary 9000"), card) == TokenIds(1000, 7999)
    assert flags.vocabulary_of(parsed("--token-ids 5:90"), {}) == TokenIds(5, 90)
    assert flags.vocabulary_of(parsed("--text"), card) == Words()
    with pytest.raises(ValueError, match="give --vocabulary N"):
        flags.vocabulary_of(parsed(""), {})


def test_requests_are_built_as_the_flags_say() -> None:
    arguments = parsed("--workload shared_prefix --seed 4 --block-tokens 16")
    vocabulary = TokenIds(1000, 2000)
    shape = flags.shape_of(arguments)
    found = flags.built(arguments, shape, vocabulary, 6, arguments.seed)
    assert len(found.requests) == 6
    assert found.reuse is not None and found.reuse.block_tokens == 16
    assert found.reuse.reusable_blocks == 2 * 512 // 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--input-tokens many", "lengths are N, uniform"),
        ("--prefixes 0", "'0' is no whole number from 1 on"),
        ("--max-context 1.5", "'1.5' is no whole number from 2 on"),
        ("--token-ids 5-9", "'5-9' is no range of token ids"),
        ("--token-ids 9:5", "from 9 to 5 are no range"),
    ],
)
def test_a_flag_that_cannot_be_read_says_what_could(words: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=message):
        parsed(words)
