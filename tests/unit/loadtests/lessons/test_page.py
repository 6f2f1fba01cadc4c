from __future__ import annotations

from html.parser import HTMLParser

from loadtests.lessons.lesson import Result, teach
from loadtests.lessons.page import pairs, render, words_of
from loadtests.lessons.terms import TERMS
from tests.unit.loadtests.lessons.made_up import TABLE, bench, lesson, raises

VOID = {"meta", "br", "link", "use", "path"}


class Checked(HTMLParser):
    """Whether the tags close in order, what is fetched from elsewhere, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        given = dict(attrs)
        self.fetched += [str(given[key]) for key in ("src", "srcset") if key in given]
        if tag == "a":
            self.links.append(str(given["href"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_shows_question_reading_plot_n_and_conditions() -> None:
    page = render([teach(lesson(), bench())])
    seen = Checked(page)
    assert seen.open == []
    for words in ("Why?", "First of [1.0, 2.0].", "First paragraph.", "steps 3", "tokens 7"):
        assert words in seen.text
    assert page.count('<svg class="plot"') == 1
    assert seen.links == ["made_up.json"]


def test_a_page_needs_nothing_from_elsewhere() -> None:
    page = render([teach(lesson(), bench())])
    assert Checked(page).fetched == []
    for word in ("http:", "https:", "@import", "<script", "<link"):
        assert word not in page.replace("http://www.w3.org/", "")


def test_text_is_escaped_in_every_place() -> None:
    bad = "<script>alert(1)</script>"
    taught = teach(
        lesson(
            TITLE=bad,
            QUESTION=bad,
            EXPLANATION=bad,
            reading=lambda _data: (bad, bad),
            tables=lambda _data: [TABLE],
            measure=lambda _bench: {"n": {bad: 1}, "conditions": {bad: bad}, "values": [1, 2]},
        ),
        bench(),
    )
    page = render([taught, Result(lesson("failed"), error=bad)])
    assert "<script" not in page
    assert "<2>" not in page
    assert page.count("&lt;script&gt;") >= 9


def test_a_failed_lesson_shows_its_error_and_no_figure_and_the_others_stay() -> None:
    failed = teach(lesson("bad", measure=raises(RuntimeError("core melted"))), bench())
    page = render([failed, teach(lesson("good"), bench())])
    seen = Checked(page)
    assert "RuntimeError: core melted" in seen.text
    assert "Title of bad (failed)" in seen.text
    assert "First of [1.0, 2.0]." in seen.text
    assert page.count('<svg class="plot"') == 1
    assert {"#bad", "#good", "good.json"} == set(seen.links)


def test_a_failure_of_the_reading_shows_no_reading_and_no_plot() -> None:
    page = render([teach(lesson(reading=raises(ValueError("odd"))), bench())])
    assert "ValueError: odd" in page
    assert "<svg" not in page
    assert "steps 3" in page


def test_a_term_is_explained_where_it_first_comes_and_only_there() -> None:
    results = [
        Result(lesson("a", TERMS=("token", "step"))),
        Result(lesson("b", TERMS=("step", "decode"))),
    ]
    assert words_of(results) == [
        {"token": TERMS["token"], "step": TERMS["step"]},
        {"decode": TERMS["decode"]},
    ]


def test_two_plots_of_one_page_share_no_id() -> None:
    page = render([teach(lesson("a"), bench()), teach(lesson("b"), bench())])
    ids = [part.partition('"')[0] for part in page.split(' id="')[1:]]
    assert len(ids) == len(set(ids))


def test_pairs_are_one_line() -> None:
    assert pairs({"tokens": 12345, "sizes": [1, 2], "mode": "quick", "on": True}) == (
        "tokens 12,345; sizes 1, 2; mode quick; on True"
    )
