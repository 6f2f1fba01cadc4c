"""Finds text in a JSON body that is none: half of a surrogate pair, which no encoding can write.

JSON allows the escape for one alone, and Python reads it. vLLM's tokeniser and stop checks fail on
it, some with a panic that says nothing. Called by http_edge.py. Pure.
"""

from __future__ import annotations

import json
import re

# As an escape without its other half, or as the three bytes that UTF-8 would have for one
# (json.loads lets them pass). A backslash that is itself escaped matches too: hence the parsing.
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_MAY_BE = re.compile(rb"%b(?!%b)|(?<!%b)%b|\xed[\xa0-\xbf]|\x00" % (_HIGH, _LOW, _HIGH, _LOW))
_LONE = re.compile("[\ud800-\udfff]")


def lone_surrogate(body: bytes) -> str | None:
    """Where in the body one is, as messages[0].content; "" for the top; None when there is none.

    None too for what is no JSON: whoever parses it next says so.
    """
    if not _MAY_BE.search(body):
        return None
    try:
        left: list[tuple[str, object]] = [("", json.loads(body))]
    except (ValueError, RecursionError):
        return None
    while left:
        where, value = left.pop()
        if isinstance(value, str):
            if _LONE.search(value):
                return where
        elif isinstance(value, list):
            left += [(f"{where}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, dict):
            if any(_LONE.search(key) for key in value):
                return where
            left += [(f"{where}.{key}" if where else key, item) for key, item in value.items()]
    return None
