from __future__ import annotations

import pytest

from loadtests.lessons.book import LESSONS, NoSuchLesson, find
from loadtests.lessons.terms import TERMS


def test_every_lesson_has_what_the_page_shows() -> None:
    for lesson in find([]):
        assert lesson.TITLE and lesson.QUESTION.endswith("?"), lesson.NAME
        assert lesson.EXPLANATION.strip(), lesson.NAME
        assert set(lesson.TERMS) <= set(TERMS), lesson.NAME
        for part in ("measure", "plots", "reading"):
            assert callable(getattr(lesson, part)), (lesson.NAME, part)


def test_a_lessons_name_is_its_modules() -> None:
    assert [lesson.NAME for lesson in find([])] == list(LESSONS)
    assert len(set(LESSONS)) == len(LESSONS)


def test_chosen_lessons_come_in_the_books_order() -> None:
    assert [lesson.NAME for lesson in find(list(reversed(LESSONS)))] == list(LESSONS)
    assert [lesson.NAME for lesson in find(["anatomy"])] == ["anatomy"]


def test_a_wrong_name_is_answered_with_the_nearest_right_one() -> None:
    with pytest.raises(NoSuchLesson, match=r"no lesson anatom \(did you mean anatomy\?\)"):
        find(["anatom"])
    with pytest.raises(NoSuchLesson, match="--list shows them"):
        find(["qqq"])
