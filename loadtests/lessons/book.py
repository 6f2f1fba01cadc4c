"""The lessons in the order in which they are read, by the names of their modules.

Called by cluster/commands/lessons.py. A new lesson is a module here and its name in one of the
lists below.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import cast

from loadtests.lessons.lesson import Lesson

# On one engine, without a server.
ENGINE_LESSONS: tuple[str, ...] = (
    "anatomy",
    "prefill_length",
    "decode_step",
    "no_kv_cache",
    "kv_memory",
    "paged_blocks",
    "block_map",
    "prefix_caching",
    "context_limit",
)
# Of many requests at once, and of the served cluster.
SERVING_LESSONS: tuple[str, ...] = (
    "batching",
    "batch_size",
    "chunked_prefill",
    "latency_parts",
    "tails",
    "apart",
)
LESSONS = (*ENGINE_LESSONS, *SERVING_LESSONS)


class NoSuchLesson(Exception):
    """A name that is no lesson's; the message has the nearest one."""


def find(names: Sequence[str]) -> list[Lesson]:
    """The lessons of these names, in the book's order; all for none. Raises NoSuchLesson."""
    for name in names:
        if name not in LESSONS:
            near = difflib.get_close_matches(name, LESSONS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise NoSuchLesson(f"there is no lesson {name}{hint}; --list shows them")
    chosen = [name for name in LESSONS if name in names] if names else list(LESSONS)
    return [_lesson(name) for name in chosen]


def _lesson(name: str) -> Lesson:
    return cast("Lesson", importlib.import_module(f"loadtests.lessons.{name}"))
