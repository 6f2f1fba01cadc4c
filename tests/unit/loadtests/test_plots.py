"""The SVG of the plots: safe inside a page, whole without anything else, the same each time."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

import pytest

from loadtests import plots

HOSTILE = '_<script>alert("$x^{")</script> & \U0001f600'


def drawn(name: str = "some", label: str = "one") -> str:
    figure, axes = plots.figure("Title", "length (tokens)", "time (ms)")
    plots.line(axes, [1.0, 10.0, 100.0], [3.0, 2.0, 1.0], label)
    plots.band(axes, [1.0, 10.0], [2.0, 2.0], [1.0, 1.0], [3.0, 3.0], "two", 1)
    plots.points(axes, [5.0], [5.0], "three", 2)
    plots.logarithmic(axes)
    plots.legend(axes)
    return plots.svg(figure, name)


def words(text: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(text).iter("text")]


def test_text_stays_text_with_the_axes_units_and_all_entries_of_the_legend() -> None:
    found = words(drawn())
    assert {"Title", "length (tokens)", "time (ms)", "one", "two", "three", "10"} <= set(found)


def test_a_hostile_label_is_shown_as_it_is_and_is_no_markup_and_no_formula() -> None:
    text = drawn(label=HOSTILE)
    assert "<script" not in text
    assert HOSTILE in [word.strip() for word in words(text)]


def test_it_refers_to_nothing_outside_carries_no_date_and_styles_nothing_else() -> None:
    text = drawn()
    assert not re.search(r"http|<style|<metadata|<image|@import|\bsrc=", text)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', text))


def test_every_id_belongs_to_its_plot_and_every_reference_is_met() -> None:
    text = drawn("first")
    ids = re.findall(r' id="([^"]*)"', text)
    pointed = re.findall(r'(?:href="#|url\(#)([^")]*)', text)
    assert ids
    assert set(pointed) == set(ids)
    assert len(ids) == len(set(ids))
    assert all(each.startswith("first-") for each in ids)


def test_the_same_figure_gives_the_same_text_and_the_pages_ink() -> None:
    assert drawn() == drawn()
    assert "currentColor" in drawn()
    assert plots.INK not in drawn()


def test_a_cdf_ends_at_one_and_says_its_n_however_many_samples_are_drawn() -> None:
    figure, axes = plots.figure("TTFT", "ms", "share")
    plots.cdf(axes, [float(value) for value in range(5000, 0, -1)], "many")
    plots.cdf(axes, [7.0], "single", 1)
    plots.cdf(axes, [], "none", 2)
    plots.legend(axes)
    many, single = ([*map(float, step.get_ydata())] for step in axes.get_lines()[:2])
    assert (many[0], many[-1]) == (0.0, 1.0)
    assert len(many) < 500
    assert many == sorted(many)
    assert single == [0.0, 1.0]
    assert {"many (n = 5,000)", "single (n = 1)", "none (n = 0)"} <= set(words(plots.svg(figure)))


def test_a_cdf_gives_the_share_at_or_below_each_value() -> None:
    _, axes = plots.figure("TTFT", "ms", "share")
    plots.cdf(axes, [30.0, 10.0, 20.0, 20.0], "four")
    (step,) = axes.get_lines()
    at = dict(zip(map(float, step.get_xdata()), map(float, step.get_ydata()), strict=True))
    assert at == {10.0: 0.25, 20.0: 0.75, 30.0: 1.0}


def test_bars_stand_side_by_side_and_none_leaves_a_gap() -> None:
    _, axes = plots.figure("Throughput", "set-up", "tokens/s")
    plots.bars(axes, ["a", "b"], {"p50": [1.0, 2.0], "p99": [3.0, None]})
    heights = [[bar.get_height() for bar in container] for container in axes.containers]
    assert heights == [[1.0, 2.0], [3.0]]
    spans = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\n b", "a b"), ("x" * 9, "x" * 9), ("abcdefghijkl", "abcd…ijkl")],
)
def test_a_label_is_one_line_cut_in_its_middle(text: str, shown: str) -> None:
    assert plots.short(text, 9) == shown


def test_series_differ_in_more_than_colour() -> None:
    looks = [plots.look(index) for index in range(len(plots.PALETTE))]
    assert len({look.color for look in looks}) == len(looks)
    assert len({(str(look.dash), look.marker) for look in looks}) == len(looks)
