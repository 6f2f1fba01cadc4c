"""What is compared: a set-up that can be started, and how it looks while it runs.

Implemented by plain.py, product.py, nixl_pair.py, ray_llm.py and addresses.py; used by
measuring.py. A set-up gets cores and limits equal to the others'; what it does with them is its
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from loadtests.sides import Limits


@dataclass(frozen=True, slots=True)
class Running:
    """A set-up that answers.

    urls: asked in turn, request by request. model: as clients call it. roots: the processes that
    were started; the others are below them. roles: label by pid, and whether it is an engine, where
    titles do not tell it (vLLM's do); what is no engine is overhead. facts: told beside figures.
    """

    urls: tuple[str, ...]
    model: str
    roots: tuple[psutil.Process, ...] = ()
    roles: Mapping[int, tuple[str, bool]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


class SetUp(Protocol):
    """label: a word for files and flags. title: for tables. mended: defects that it is run without.

    how: what it is made of, in a sentence.
    """

    @property
    def label(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def how(self) -> str: ...

    @property
    def mended(self) -> Sequence[str]: ...

    def start(self, folder: Path) -> AbstractContextManager[Running]:
        """Ready within the block, gone after it; logs go to the folder. Raises SideFailed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a comparison runs.

    cores: one for each engine. limits: every engine's. packages: a folder for what peers need
    beyond our own environment.
    """

    cores: tuple[int, ...]
    limits: Limits
    packages: Path
