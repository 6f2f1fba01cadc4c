"""The page as a browser sees it: whole by itself, with n and conditions, with nothing injected."""

from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from loadtests import plots
from loadtests.load.records import CpuShare, Outcome, Run
from loadtests.report import page
from loadtests.report.comparison import compare
from loadtests.report.entries import entries
from tests.unit.loadtests.report.made_runs import CONDITIONS, failed, lifelike, run, sample

HOSTILE = '<script>alert(1)</script><img src=x onerror="a">"\'&{{ 7 * 7 }}$x^{'
VOID = {"meta", "link", "img", "br", "use", "path", "rect"}


class Reader(HTMLParser):
    """Elements with their attributes, text, headings, and the text of each table's cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.words: list[str] = []
        self._section = ""
        self._cell: list[str] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.elements.append((tag, named))
        if tag == "section":
            self._section = named["id"]
        elif tag == "tr":
            self.tables.setdefault(self._section, []).append([])
        elif tag in {"td", "th"}:
            self._cell = []

    def handle_endtag(self, tag: str) -> None:
        if tag in {"td", "th"} and self._cell is not None:
            self.tables[self._section][-1].append("".join(self._cell))
            self._cell = None

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._cell is not None:
            self._cell.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for found, attributes in self.elements if found == tag]


def html(*runs: Run, title: str = "", **options: Any) -> str:
    files = [Path(f"{n}.json") for n in range(len(runs))]
    comparison = compare([str(file) for file in files], runs, **options)
    shown = entries(list(zip(files, runs, strict=True)), comparison)
    return page.render(shown, comparison, title)


def read(*runs: Run, **options: Any) -> Reader:
    return Reader(html(*runs, **options))


def sweep(*rates: float) -> list[Run]:
    return [lifelike(label="one", rate=rate, n=60, seed=round(rate * 10)) for rate in rates]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots by title alone: to draw one takes longer than all the rest of a page."""

    def titled(figure: Figure, name: str) -> str:
        return f'<svg aria-label="{escape(figure.axes[0].get_title(loc="left"))}"></svg>'

    monkeypatch.setattr(plots, "svg", titled)


@pytest.fixture(scope="module")
def whole() -> str:
    return html(lifelike(label="whole"))


def test_it_refers_to_nothing_outside_itself_and_has_no_script(whole: str) -> None:
    found = Reader(whole)
    assert not {"script", "link", "iframe", "object", "img", "image", "base"} & {
        tag for tag, _ in found.elements
    }
    for _, attributes in found.elements:
        assert not {"src", "srcset", "data", "action"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", whole)


def test_its_own_policy_forbids_it_to_load_anything(whole: str) -> None:
    (policy,) = (m for m in Reader(whole).all("meta") if "http-equiv" in m)
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_every_link_leads_somewhere_and_no_id_is_there_twice(whole: str) -> None:
    found = Reader(whole)
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {attributes["href"][1:] for _, attributes in found.elements if "href" in attributes}
    assert targets
    assert targets <= set(ids)


def test_every_table_is_there_and_before_every_plot(whole: str) -> None:
    found = Reader(whole)
    assert found.tables.keys() == {
        *("overview", "conditions", "environment", "outcomes", "failures", "latency", "groups"),
        *("throughput", "goodput", "cached", "cpu", "lag"),
    }
    tags = [tag for tag, _ in found.elements]
    last_table = len(tags) - tags[::-1].index("table")
    assert last_table < tags.index("svg")


def test_every_latency_is_there_at_all_percentiles_with_its_n(whole: str) -> None:
    head, *rows = Reader(whole).tables["latency"]
    assert head == ["ms", "n", "mean", "p50", "p90", "p95", "p99", "least", "most"]
    assert [row[0] for row in rows] == ["TTFT", "TPOT", "ITL", "E2E"]
    assert all(int(row[1].replace(",", "")) > 0 for row in rows)


def test_every_plot_of_one_run_is_there(whole: str) -> None:
    titles = [svg["aria-label"] for svg in Reader(whole).all("svg")]
    assert titles == [
        *(f"{name}: share at or below" for name in ("TTFT", "TPOT", "ITL", "E2E")),
        *("Requests over time", "TTFT by when it was sent", "In flight"),
        *("Output tokens over time", "Cached input over time"),
    ]


def test_no_plot_and_no_table_of_figures_stands_without_its_conditions_and_n(whole: str) -> None:
    told = "Conditions: model tiny · workload.kind chat"
    figures = re.findall(r"<figure>.*?</figure>", whole, re.DOTALL)
    assert len(figures) == 9
    for figure in figures:
        assert told in figure
        assert "n = " in figure
    tables = re.findall(r"<section id=.*?</section>", whole, re.DOTALL)
    for key in ("overview", "outcomes", "latency", "throughput", "goodput", "cached", "cpu"):
        (section,) = (text for text in tables if f'id="{key}"' in text)
        assert told in section


def test_what_comes_from_a_file_is_text_and_nothing_else() -> None:
    plain = read(run([sample(0), failed(Outcome.ERROR_EVENT, 1)], label="a"))
    hostile = read(
        run(
            [sample(0, group=HOSTILE), sample(2), failed(Outcome.ERROR_EVENT, 1, detail=HOSTILE)],
            label=HOSTILE,
            conditions={HOSTILE: HOSTILE},
            facts={HOSTILE: {HOSTILE: HOSTILE}},
            cpu=(CpuShare(HOSTILE, 1.0, engine=True),),
            slo={},
        ),
        title=HOSTILE,
    )
    assert {tag for tag, _ in hostile.elements} == {tag for tag, _ in plain.elements}
    assert HOSTILE in "".join(hostile.words)
    for key in ("overview", "conditions", "environment", "failures", "groups", "cpu"):
        assert any(HOSTILE in cell for row in hostile.tables[key] for cell in row), key
    assert not any(
        name.startswith("on") for _, attributes in hostile.elements for name in attributes
    )


@pytest.mark.usefixtures("undrawn")
def test_no_figure_of_a_failed_request_is_in_the_page() -> None:
    bad = [failed(outcome, n + 5) for n, outcome in enumerate(Outcome) if outcome != Outcome.OK]
    text = html(run([*(sample(n) for n in range(5)), *bad], window_s=(0.0, 10.0)))
    assert not re.search(r"7[,.]?77\d", text)


@pytest.mark.usefixtures("undrawn")
def test_different_conditions_are_said_at_the_top_where_they_are_shown_all_the_same() -> None:
    other = {**CONDITIONS, "seed": 2, "model": "<b>big</b>", "<i>": 1}
    found = html(run(label="a"), run(label="b", conditions=other), anyway=True)
    head = found[found.index("<header>") : found.index("<nav")]
    assert "These runs were made under different conditions" in head
    assert "<strong>seed</strong>: 1; 2" in head
    assert "<strong>model</strong>: tiny; &lt;b&gt;big&lt;/b&gt;" in head
    assert "<strong>&lt;i&gt;</strong>: (not told); 1" in head
    assert "different conditions" not in html(run(label="a"), run(label="b"))


@pytest.mark.usefixtures("undrawn")
def test_what_spoils_the_figures_is_said_at_the_top() -> None:
    found = html(run(facts={"cut_short": "stopped after 3 s"}))
    assert "stopped after 3 s" in found[: found.index("<nav")]


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_has_its_figures_against_its_key() -> None:
    found = read(*sweep(1.0, 4.0), across="rate")
    titles = [svg["aria-label"] for svg in found.all("svg")]
    for name in ("TTFT", "TPOT", "ITL", "E2E", "Goodput", "Throughput", "Cached input", "Success"):
        assert f"{name} against rate" in titles


@pytest.mark.usefixtures("undrawn")
def test_several_runs_stand_side_by_side() -> None:
    found = read(*(lifelike(label=label, n=60) for label in ("ours", "theirs")))
    titles = [svg["aria-label"] for svg in found.all("svg")]
    for name in ("TTFT", "TPOT", "ITL", "E2E", "Goodput", "Throughput", "Cached input", "Success"):
        assert f"{name} by run" in titles
    assert titles.count("In flight") == 2
    assert not any("against" in title for title in titles)


@pytest.mark.usefixtures("undrawn")
def test_of_very_many_runs_not_all_timelines_are_drawn_and_the_page_says_so() -> None:
    found = read(*(run([sample(n)], label=f"run {n}") for n in range(15)))
    assert [svg["aria-label"] for svg in found.all("svg")].count("In flight") == 12
    assert "Of 15 runs the first 12 are drawn." in found.text


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_samples_or_without_success_has_a_page() -> None:
    nothing = read(run([], slo={"ttft_ms": 1.0}))
    assert "n = 0 measured requests" in nothing.text
    assert not nothing.all("svg")
    bad = read(run([failed(Outcome.UNREACHABLE, n) for n in range(3)]))
    titles = [svg["aria-label"] for svg in bad.all("svg")]
    assert titles == ["Requests over time", "In flight"]


@pytest.mark.usefixtures("undrawn")
def test_one_token_answers_have_no_tpot_and_no_itl() -> None:
    found = read(run([sample(n, tokens=1) for n in range(3)]))
    titles = [svg["aria-label"] for svg in found.all("svg")]
    assert "TTFT: share at or below" in titles
    assert not any(title.startswith(("TPOT", "ITL")) for title in titles)


@pytest.mark.usefixtures("undrawn")
def test_a_title_may_be_given(whole: str) -> None:
    assert "<title>Load test: whole</title>" in whole
    assert "<title>Ours &amp; theirs</title>" in html(run(), title="Ours & theirs")


def test_the_same_run_gives_the_same_page(whole: str) -> None:
    assert html(lifelike(label="whole")) == whole
