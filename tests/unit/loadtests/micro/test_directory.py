"""The directory's benchmark measures what it says, on few blocks."""

from __future__ import annotations

import pytest

from loadtests.micro import directory

BLOCKS = 2048


def test_all_tables_are_there_and_the_blocks_are_really_held_and_really_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory, "_LOOKUPS", 100)
    monkeypatch.setattr(directory.gc, "collect", lambda: 0)  # of pytest's own many objects
    filled = directory.Filled(BLOCKS)
    assert filled.core.blocks == filled.index.locations == len(filled.bare) == BLOCKS
    prompt = next(directory.prompts(BLOCKS))
    assert filled.index.match("bench", prompt) == {"slab:0": len(prompt)}
    lookups, recovery = filled.lookups(), filled.recovery()
    assert [row[3] for row in lookups.rows if row[0].startswith("dict")] == ["1.0", "1.0"]
    assert len(recovery.rows) == 5
    events, _ = filled.ingest()
    assert [row[0] for row in events.rows if row[3] == "1.0"] == ["dict: insert", "dict: delete"]
    assert filled.core.blocks == filled.index.locations == len(filled.bare) == 0
    filled.core.validate()
    filled.index.validate()
