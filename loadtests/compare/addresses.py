"""A server that runs already, at any URL. Used by measuring.py.

Nothing is started, so that nothing is known of its cores and processes: no claim is made of it.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

from loadtests.compare.setups import Running
from loadtests.sides import SideFailed


@dataclass(frozen=True, slots=True)
class Address:
    """Any OpenAI-compatible server. model: None for the one model that it offers."""

    label: str
    url: str
    model: str | None = None
    mended: Sequence[str] = ()

    @property
    def title(self) -> str:
        return self.url

    @property
    def how(self) -> str:
        return f"the server at {self.url}, which was running"

    @contextmanager
    def start(self, folder: Path) -> Iterator[Running]:  # noqa: ARG002 - as the others
        root = self.url.rstrip("/").removesuffix("/v1")
        yield Running(urls=(root,), model=self.model or _only_model(root))


def _only_model(root: str) -> str:
    url = f"{root}/v1/models"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - the user named it
            offered = [str(each["id"]) for each in json.load(answer)["data"]]
    except (URLError, OSError, ValueError, KeyError, TypeError) as failed:
        raise SideFailed(f"GET {url}: {failed}") from failed
    if len(offered) != 1:
        raise SideFailed(
            f"GET {url}: {len(offered)} models ({', '.join(offered)}); name one with --url-model"
        )
    return offered[0]
