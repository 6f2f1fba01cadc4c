"""The one HTML page of the lessons: opened offline, for a reader and not for an engineer.

Called by cluster/commands/lessons.py. It shows what a Result holds and derives nothing. Everything
is within the file: style, SVG. Every text goes through jinja2's escaping but the plots, which
loadtests/plots.py escapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from loadtests import plots
from loadtests.lessons.lesson import Result
from loadtests.lessons.terms import TERMS

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Inference, measured here</title>
<style>
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --accent: #0072b2;
  --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --accent: #56b4e9; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, "DejaVu Sans", Verdana, sans-serif; margin: 0 auto;
  max-width: 62rem; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.4rem; line-height: 1.25; margin: 0 0 .3rem; }
p, li, dd { max-width: 46rem; }
nav ol { columns: 2 22rem; padding-left: 1.4rem; }
a { color: var(--accent); }
article { border-top: 1px solid var(--line); margin-top: 2.2rem; padding-top: 1.6rem; }
.question { font-style: italic; margin: 0 0 1rem; }
.reading { background: var(--soft); border-left: 4px solid var(--accent); font-size: 1.06rem;
  margin: 1rem 0; padding: .6rem 1rem; }
.reading p { margin: .3rem 0; }
.failed { border-left-color: var(--bad); }
.failed pre { overflow-x: auto; white-space: pre-wrap; }
.plots { display: grid; gap: 1rem 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); }
.plots svg { height: auto; max-width: 44rem; width: 100%; }
dl { column-gap: 2rem; columns: 2 22rem; font-size: .88rem; line-height: 1.45; margin: 1rem 0; }
dl div { break-inside: avoid; margin-bottom: .45rem; }
dt, dd { display: inline; margin: 0; } dt { font-weight: 600; } dt::after { content: ": "; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { font-weight: 600; padding: .4rem 0; text-align: left; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: left;
  vertical-align: top; }
.scroll { margin: 1rem 0; overflow-x: auto; }
.conditions { color: color-mix(in srgb, currentColor 75%, transparent); font-size: .86rem; }
@media print { article { break-inside: avoid-page; } nav { display: none; } }
</style>
</head>
<body>
<h1>Inference, measured here</h1>
<p>How a language model is served, one question at a time. Nothing on this page is taken from a
book: each answer was measured on a real vLLM engine on this machine, a small model on one CPU
core. A GPU is far faster, and its figures are others; how the curves bend is what carries over.</p>
{% if results | length > 1 %}
<nav><ol>
{% for result in results %}<li><a href="#{{ result.lesson.NAME }}">{{ result.lesson.TITLE }}</a>
{%- if result.error %} (failed){% endif %}</li>
{% endfor %}</ol></nav>
{% endif %}
{% for result in results %}
<article id="{{ result.lesson.NAME }}">
<h2>{{ loop.index }}. {{ result.lesson.TITLE }}</h2>
<p class="question">{{ result.lesson.QUESTION }}</p>
{% if result.error %}
<div class="reading failed"><p><strong>This lesson failed.</strong> It shows no figure.</p>
<pre>{{ result.error }}</pre></div>
{% else %}
<div class="reading">{% for sentence in result.reading %}<p>{{ sentence }}</p>{% endfor %}</div>
{% endif %}
{% if drawn[loop.index0] %}
<div class="plots">{% for svg in drawn[loop.index0] %}<div>{{ svg }}</div>{% endfor %}</div>
{% endif %}
{% if words[loop.index0] %}
<dl>{% for word, meaning in words[loop.index0].items() %}
<div><dt>{{ word }}</dt><dd>{{ meaning }}</dd></div>{% endfor %}</dl>
{% endif %}
{% for paragraph in paragraphs(result.lesson.EXPLANATION) %}<p>{{ paragraph }}</p>
{% endfor %}
{% for table in result.tables %}
<div class="scroll"><table><caption>{{ table.title }}</caption>
<thead><tr>{% for cell in table.head %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div>
{% endfor %}
{% if result.data %}
<p class="conditions"><strong>n:</strong> {{ pairs(result.data.n) }}.
<strong>Conditions:</strong> {{ pairs(result.data.conditions) }}.
Measured {{ result.data.date }} in {{ result.data.seconds }} s.
Data: <a href="{{ result.lesson.NAME }}.json">
{{- result.lesson.NAME }}.json</a></p>
{% endif %}
</article>
{% endfor %}
</body>
</html>
"""


def render(results: Sequence[Result]) -> str:
    """The page."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    drawn = [
        [
            Markup(plots.svg(figure, f"{result.lesson.NAME}-{number}"))  # noqa: S704 - escaped by it
            for number, figure in enumerate(result.plots)
        ]
        for result in results
    ]
    return environment.from_string(_TEMPLATE).render(
        results=results, words=words_of(results), drawn=drawn, pairs=pairs, paragraphs=paragraphs
    )


def paragraphs(text: str) -> list[str]:
    """What blank lines part."""
    return [" ".join(part.split()) for part in text.strip().split("\n\n")]


def words_of(results: Sequence[Result]) -> list[dict[str, str]]:
    """For each lesson the words that no lesson before it has explained."""
    known: set[str] = set()
    found = []
    for result in results:
        new = [word for word in result.lesson.TERMS if word not in known]
        known.update(new)
        found.append({word: TERMS[word] for word in new})
    return found


def pairs(values: Mapping[str, Any]) -> str:
    """Names and values in one line."""
    return "; ".join(f"{name} {_plain(value)}" for name, value in values.items())


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
