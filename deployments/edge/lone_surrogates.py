"""Finds text in a JSON body that is none: half of a surrogate pair, which no encoding can write.

JSON allows the escape for one alone, and Python reads it. vLLM's tokeniser and stop checks fail on
it, some with a panic that says nothing. Called by http_edge.py. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from deployments.edge.request_body import RequestBody

# As an escape without its other half, or as the three bytes that UTF-8 would have for one
# (json.loads lets them pass). A backslash that is itself escaped matches too: hence the parsing.
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_MAY_BE = re.compile(rb"%b(?!%b)|(?<!%b)%b|\xed[\xa0-\xbf]|\x00" % (_HIGH, _LOW, _HIGH, _LOW))
_LONE = re.compile("[\ud800-\udfff]")


def lone_surrogate(body: RequestBody) -> str | None:
    """Where in the body one is, as messages[0].content; "" for the top; None when there is none.

    None too for what is no JSON: whoever parses it next says so. Takes time and memory in
    proportion to the body, whatever its shape.
    """
    if not _MAY_BE.search(body.raw):
        return None
    # The way to where we are, a level each: its name there, and what of its parent is still to do.
    names = [""]
    levels = [iter([("", body.asked)])]
    while levels:
        for names[-1], value in levels[-1]:
            if _is_lone(value):
                return "".join(names).removeprefix(".")
            if isinstance(value, list | dict):
                names.append("")
                levels.append(_parts_of(value))
                break
        else:
            levels.pop()
            names.pop()
    return None


def _is_lone(value: object) -> bool:
    """Whether this text, or a name in this object, holds one."""
    if isinstance(value, dict):
        return any(_LONE.search(name) for name in value)
    return isinstance(value, str) and _LONE.search(value) is not None


def _parts_of(value: list[object] | dict[str, object]) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        return ((f".{name}", item) for name, item in value.items())
    return ((f"[{place}]", item) for place, item in enumerate(value))
