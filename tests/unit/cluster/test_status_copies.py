"""`headwater status` says which way blocks take between engines and slabs."""

from __future__ import annotations

from typing import Any

from cluster.status_view import _copies_lines


def worker(name: str, way: str | None) -> dict[str, Any]:
    return {"id": name} if way is None else {"id": name, "kv_copies": way}


def test_workers_that_take_the_same_way_share_a_line() -> None:
    bounce = "cuda:0, through a pinned bounce buffer of 32 MiB (the slab is being pinned)"
    workers = [worker("p-1", "cuda:0, slab pinned"), worker("d-1", bounce), worker("d-2", bounce)]
    assert _copies_lines(workers) == [
        "Block copies of p-1: cuda:0, slab pinned.",
        f"Block copies of d-1, d-2: {bounce}.",
    ]


def test_nothing_is_said_of_workers_that_say_nothing() -> None:
    assert _copies_lines([worker("p-1", None), worker("d-1", "")]) == []
