from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from loadtests.load.token_prompts import TokenIds, Words, token_ids, vocabulary_size


def test_ids_leave_out_both_ends_of_the_vocabulary() -> None:
    ids = token_ids(49152)
    assert (ids.least, ids.most) == (1000, 48151)
    drawn = ids.draw(random.Random(1), 200_000)
    assert min(drawn) >= 1000 and max(drawn) <= 48151
    assert (min(drawn) < 1010) and (max(drawn) > 48140)


def test_a_small_vocabulary_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="give the range of ids yourself"):
        token_ids(2001)
    with pytest.raises(ValueError, match="no range"):
        TokenIds(5, 5)


def test_ids_are_sent_as_they_are_and_words_as_text() -> None:
    rng = random.Random(1)
    assert set(TokenIds(5, 9).draw(rng, 500)) == {5, 6, 7, 8, 9}
    ids = TokenIds(5, 9).draw(rng, 6)
    assert TokenIds(5, 9).prompt(ids) == ids
    text = Words().prompt(Words().draw(rng, 6))
    assert len(text.split()) == 6


def test_equal_first_ids_are_equal_first_words() -> None:
    words = Words()
    shared = words.draw(random.Random(1), 5)
    one, other = (words.prompt(shared + words.draw(random.Random(n), 5)) for n in (2, 3))
    assert one != other
    assert one.startswith(words.prompt(shared) + " ") and one.split()[:5] == other.split()[:5]


def test_each_word_stands_for_one_id() -> None:
    text = Words().prompt(range(300))
    assert len(set(text.split())) == 300


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"vocab_size": 321}, 321),
        ({"text_config": {"vocab_size": 654}}, 654),
        ({}, None),
        ({"vocab_size": "many"}, None),
        ([], None),
    ],
)
def test_the_vocabulary_is_what_the_served_models_folder_says(
    tmp_path: Path, config: object, size: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocabulary_size({"id": "m", "root": str(tmp_path)}) == size


def test_a_server_elsewhere_tells_no_vocabulary() -> None:
    assert vocabulary_size({"id": "m", "root": "org/model"}) is None
    assert vocabulary_size({"id": "m"}) is None
