"""Headwater with one prefill and one decode worker. Started by measuring.py, as a user starts it.

Must not import the product.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.compare.setups import Running
from loadtests.load.cpu import headwater_roles
from loadtests.sides import headwater


@dataclass(frozen=True, slots=True)
class Headwater:
    """`headwater serve` with its configuration. model: a folder; None for the configured one."""

    label: str
    config: dict[str, Any]
    model: str | None = None
    mended: Sequence[str] = ()

    @property
    def title(self) -> str:
        workers = self.config["workers"]
        return (
            f"Headwater, {workers['prefill']['replicas']} prefill, "
            f"{workers['decode']['replicas']} decode"
        )

    @property
    def how(self) -> str:
        return "`headwater serve` as configured, each worker bound to a core"

    @contextmanager
    def start(self, folder: Path) -> Iterator[Running]:
        with headwater(folder, self.config, self.model) as side:
            (model,) = _asked(f"{side.url}/v1/models")["data"]
            yield Running(
                urls=(side.url,),
                model=model["id"],
                roots=(side.process,),
                roles=headwater_roles(side.url),
                facts={"model_folder": model["root"]},
            )


def _asked(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - a server of ours
        return dict(json.load(answer))
