"""Planted bugs: each a small change of production code that some invariant must notice.

The source of one function is changed as text and compiled anew in its own module; a text that is no
longer there, or there twice, is an error, so that no mutant rots into a no-op. Nothing is written
to disk, and the original is back when the `with` ends.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mutant:
    """target: "module:Class.method" or "module:function". old -> new, once."""

    name: str
    target: str
    old: str
    new: str


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Production code with this bug. Raises LookupError where its text has changed."""
    module_name, _, path = mutant.target.partition(":")
    module: Any = importlib.import_module(module_name)
    *owners, name = path.split(".")
    owner = module
    for part in owners:
        owner = getattr(owner, part)
    original = owner.__dict__[name]
    source = textwrap.dedent(inspect.getsource(original))
    old = mutant.old
    if source.count(old) != 1:
        raise LookupError(f"{mutant.name}: {source.count(old)} times {old!r} in {mutant.target}")
    scope: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + source.replace(old, mutant.new),
                   f"<mutant: {mutant.name}>", "exec")  # fmt: skip
    exec(code, module.__dict__, scope)
    setattr(owner, name, scope[name])
    try:
        yield
    finally:
        setattr(owner, name, original)
