"""The one style of every plot: figures of matplotlib, drawn as SVG to stand inside a page.

Called by loadtests/report and by the lessons. It draws what it is given and computes no metric.
No pyplot: no state outlives a figure. The SVG refers to nothing outside itself, carries no date,
keeps text as text, takes its ink from the page (`currentColor`, for light pages and dark ones),
and is the same for the same figure. Only what draws may import this: matplotlib is not part of
the serving lock.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Okabe and Ito's, which colour-blind people can tell apart, without the yellow and the black that
# one of light and dark pages swallows.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")
# Colour alone carries nothing: series differ in dash and marker as well.
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SIZE_IN = (4.8, 3.0)
"""So narrow that the text is still readable where a phone shows the figure at full width."""

# No one draws with this colour: svg() turns it into the page's.
INK = "#010203"
_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.formatter.limits": (-4, 9),
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
}
_ROOT_STYLE = (
    "style=\"font-family: 'DejaVu Sans', Verdana, Arial, sans-serif; "
    'stroke-linejoin: round; stroke-linecap: butt"'
)
_LABEL_CHARACTERS_MAX = 48
_HALF_LINE_CHARACTERS = 24
_DENSE_POINTS = 400
_LEGEND_ROW_IN = 0.2
_ROOM = 1.04


@dataclass(frozen=True, slots=True)
class Look:
    """How one series is told from the others."""

    color: str
    dash: Any
    marker: str


def look(index: int) -> Look:
    """Of the series with this number, counted from 0."""
    return Look(
        PALETTE[index % len(PALETTE)],
        DASHES[index % len(DASHES)],
        MARKERS[index % len(MARKERS)],
    )


def figure(title: str, x: str, y: str, size: tuple[float, float] = SIZE_IN) -> tuple[Figure, Axes]:
    """An empty plot. x and y: what the axes show, with its unit. size: width and height, inches."""
    with mpl.rc_context(_STYLE):
        drawn = Figure(figsize=size, layout="constrained")
        drawn.patch.set_alpha(0.0)
        axes = drawn.add_subplot()
        axes.patch.set_alpha(0.0)
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
    return drawn, axes


def line(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    label: str,
    index: int = 0,
    *,
    markers: bool = True,
) -> None:
    """One series of points, joined; with markers unless there are too many to tell apart."""
    style = look(index)
    axes.plot(
        x,
        y,
        color=style.color,
        linestyle=style.dash,
        marker=style.marker if markers and len(x) <= _DENSE_POINTS // 10 else "",
        label=_entry(label),
    )


def band(
    axes: Axes,
    x: Sequence[float],
    middle: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    label: str,
    index: int = 0,
) -> None:
    """A line with the range round it; say in the title what the range is."""
    axes.fill_between(x, low, high, color=look(index).color, alpha=0.2, linewidth=0)
    line(axes, x, middle, label, index)


def points(axes: Axes, x: Sequence[float], y: Sequence[float], label: str, index: int = 0) -> None:
    """Single samples, not joined."""
    style = look(index)
    axes.plot(
        x,
        y,
        color=style.color,
        marker=style.marker,
        markersize=3.0 if len(x) > _DENSE_POINTS // 4 else 4.5,
        alpha=0.7,
        linestyle="",
        label=_entry(label),
    )


def cdf(axes: Axes, values: Sequence[float], label: str, index: int = 0) -> None:
    """The share of samples at or below each value, exactly; n becomes a part of the label.

    Of more samples than can be seen apart, only every so manieth step is drawn.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    n = len(ordered)
    share = np.arange(1, n + 1) / n if n else ordered
    if n > _DENSE_POINTS:
        kept = np.unique(np.linspace(0, n - 1, _DENSE_POINTS).round().astype(int))
        ordered, share = ordered[kept], share[kept]
    if n:
        ordered, share = np.append(ordered[:1], ordered), np.append(0.0, share)
    style = look(index)
    axes.step(
        ordered.tolist(),
        share.tolist(),
        where="post",
        color=style.color,
        linestyle=style.dash,
        label=f"{_entry(label)} (n = {n:,})",
    )
    axes.set_ylim(0.0, 1.02)


def bars(axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Bars side by side: one cluster a group, one bar of it a series; None leaves a gap."""
    width = 0.8 / max(1, len(series))
    places = np.arange(len(groups), dtype=float)
    for index, (label, values) in enumerate(series.items()):
        shift = (index - (len(series) - 1) / 2) * width
        present = [
            (at, value) for at, value in zip(places, values, strict=True) if value is not None
        ]
        axes.bar(
            [float(at + shift) for at, _ in present],
            [value for _, value in present],
            width=width * 0.92,
            color=look(index).color,
            label=_entry(label),
        )
    axes.set_xticks(places.tolist(), [_two_lines(group) for group in groups])
    axes.grid(visible=False, axis="x")


def dots(axes: Axes, rows: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """A row a group, the first one at the top; in it every value as a point, by series.

    For groups with long names, and for values that should be seen one by one.
    """
    labels = list(
        dict.fromkeys(k for series in rows.values() for k, some in series.items() if some)
    )
    lanes = {label: (at - (len(labels) - 1) / 2) * 0.24 for at, label in enumerate(labels)}
    for index, label in enumerate(labels):
        x = [value for series in rows.values() for value in series.get(label, ())]
        y = [
            place + lanes[label]
            for place, series in enumerate(rows.values())
            for _ in series.get(label, ())
        ]
        points(axes, x, y, label, index)
    axes.set_yticks(range(len(rows)), [_two_lines(row) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)


def from_zero(axes: Axes, which: Literal["x", "y", "both"] = "y") -> None:
    """Let an axis begin at 0, with room beyond the largest value; call it when all is drawn."""
    if which in {"x", "both"}:
        axes.set_xlim(0.0, _ROOM * max(axes.get_xlim()[1], 0.0) or 1.0)
    if which in {"y", "both"}:
        axes.set_ylim(0.0, _ROOM * max(axes.get_ylim()[1], 0.0) or 1.0)


def logarithmic(axes: Axes, which: Literal["x", "y"] = "x") -> None:
    """Make one axis logarithmic, with plain numbers at its ticks; call it when all is drawn.

    What is not above 0 lies left of (or below) all that is seen.
    """
    if which == "x":
        axes.set_xscale("log", nonpositive="clip")
        axis: Axis = axes.xaxis
    else:
        axes.set_yscale("log", nonpositive="clip")
        axis = axes.yaxis
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    steps = (1.0, 2.0, 5.0) if decades < 2 else (1.0, 3.0) if decades < 3 else (1.0,)  # noqa: PLR2004
    axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def legend(axes: Axes) -> None:
    """Below the plot, where it hides no data; call it when all is drawn."""
    handles, labels = axes.get_legend_handles_labels()
    figure_of = axes.get_figure()
    if not handles or not isinstance(figure_of, Figure):
        return
    columns = 2 if max(map(len, labels)) <= _HALF_LINE_CHARACTERS else 1
    # The first line has its room; the figure grows by the others, so that the plot does not shrink.
    rows = -(-len(labels) // columns)
    figure_of.set_figheight(figure_of.get_figheight() + (rows - 1) * _LEGEND_ROW_IN)
    with mpl.rc_context(_STYLE):
        figure_of.legend(handles, labels, loc="outside lower left", ncols=columns)


def short(text: str, characters_max: int = _LABEL_CHARACTERS_MAX) -> str:
    """The text in one line, cut in its middle where it is too long for a plot."""
    flat = " ".join(text.split())
    if len(flat) <= characters_max:
        return flat
    head = (characters_max - 1) // 2
    return f"{flat[:head]}…{flat[head + 1 - characters_max :]}"


def _two_lines(text: str) -> str:
    """As a tick shows it."""
    return "\n".join(
        textwrap.wrap(short(text, 2 * _HALF_LINE_CHARACTERS - 8), _HALF_LINE_CHARACTERS)
    )


def _entry(label: str) -> str:
    """As a legend shows it: matplotlib hides entries that begin with an underscore."""
    return f" {short(label)}" if label.startswith("_") else short(label)


def svg(drawn: Figure, name: str = "plot") -> str:
    """The figure as an <svg> element for a page.

    name: unique among the plots of one page; the ids inside begin with it.
    """
    for text in drawn.findobj(lambda artist: isinstance(artist, Text)):
        # A dollar sign in a label is no formula. Ticks write theirs as formulae.
        if isinstance(text, Text) and not text.get_text().startswith("$\\mathdefault"):
            text.set_parse_math(False)
    buffer = io.BytesIO()
    style = {**_STYLE, "svg.fonttype": "none", "svg.hashsalt": name}
    with mpl.rc_context(style), warnings.catch_warnings():
        # The browser has other fonts than the one that text is measured with here.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        drawn.savefig(
            buffer,
            format="svg",
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
    return _inline(buffer.getvalue().decode(), name, drawn)


def _inline(text: str, name: str, drawn: Figure) -> str:
    text = text[text.index("<svg") :].rstrip()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    # A style element would hold for the whole page.
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;]*; ", "", text)
    head, end, body = text.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None, head
    title = drawn.axes[0].get_title(loc="left") if drawn.axes else ""
    head = f'<svg class="plot" {box.group()} role="img" aria-label="{escape(title)}" {_ROOT_STYLE}'
    # An id that nothing points to is only a chance of meeting another one's.
    pointed = set(re.findall(r'(?:xlink:href="#|url\(#)([\w.-]+)', body))
    prefix = re.sub(r"[^\w-]", "-", name)
    body = re.sub(
        r' id="([^"]*)"',
        lambda found: f' id="{prefix}-{found.group(1)}"' if found.group(1) in pointed else "",
        body,
    )
    body = re.sub(r'xlink:href="#', f'href="#{prefix}-', body)
    body = re.sub(r"url\(#", f"url(#{prefix}-", body)
    return (head + end + body).replace(INK, "currentColor")
