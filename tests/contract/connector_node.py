"""A node for the connector's contract tests: one agent that can be killed, and its prompts.

Called by the test_connector_*.py modules.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcache.agent import AgentServer
from kvcache.ledger import SlotLedger

MODEL = "smollm2"


class Node:
    """One agent at one socket path."""

    def __init__(self, folder: Path, slab_bytes: int) -> None:
        self.socket_path = str(folder / "agent.sock")
        self._slab_bytes = slab_bytes
        self.agent = AgentServer(self.socket_path, slab_bytes)

    def restart(self) -> None:
        """A new incarnation, with an empty slab."""
        self.agent = AgentServer(self.socket_path, self._slab_bytes)

    def ledger(self) -> SlotLedger:
        """The books, after a check that they agree with the slot table."""
        self.agent.validate()
        assert self.agent.ledger(MODEL).leased_slots == self.agent.scan(MODEL).leased_slots
        return self.agent.ledger(MODEL)

    def corrupt(self, name: bytes) -> None:
        """Flip one byte of a published block, behind everybody's back."""
        arena = self.agent._arenas[MODEL]
        slot = arena.table._rows.named[name]
        arena.slab._mapping.slots[slot][12345] ^= 0xFF


def model_path() -> str:
    """The model's folder; skips where there is none."""
    path = os.environ.get("HEADWATER_TEST_MODEL", "")
    if not path:
        pytest.skip("missing: HEADWATER_TEST_MODEL, a folder with SmolLM2-135M-Instruct")
    return path


def prompt(tokens: int = 811) -> list[int]:
    """A readable prompt of so many tokens."""
    from tokenizers import Tokenizer

    people = ["merchant", "sailor", "teacher", "doctor", "miller", "baker"] * 12
    text = "\n".join(
        f"Chapter {number}: The {who} travelled across the old town with {number * 7} boxes of tea."
        for number, who in enumerate(people)
    )
    ids = Tokenizer.from_file(f"{model_path()}/tokenizer.json").encode(text).ids
    assert len(ids) >= tokens
    return list(ids[:tokens])
