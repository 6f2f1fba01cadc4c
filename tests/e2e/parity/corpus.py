"""The whole parity corpus."""

from __future__ import annotations

from dataclasses import replace

from tests.e2e.parity.asking import Ask
from tests.e2e.parity.of_chat import chats
from tests.e2e.parity.of_completions import completions
from tests.e2e.parity.of_grammars import grammars
from tests.e2e.parity.of_http import exchanges
from tests.e2e.parity.of_messages import messages
from tests.e2e.parity.of_responses import responses
from tests.e2e.parity.of_tokens import tokens
from tests.e2e.parity.of_tools import tools

_FILES: dict[str, list[Ask]] = {
    "completions": completions(),
    "chat": chats(),
    "tools": tools(),
    "grammars": grammars(),
    "responses": responses(),
    "messages": messages(),
    "tokens": tokens(),
    "http": exchanges(),
}


def _within(api: str, ask: Ask) -> Ask:
    """Names and salts of one API apart from those of another."""
    salt = None if ask.salt is None else f"{api} {ask.salt}"
    return replace(ask, name=f"{api}: {ask.name}", salt=salt)


ASKS = [_within(api, ask) for api, asks in _FILES.items() for ask in asks]
BY_NAME = {ask.name: ask for ask in ASKS}
assert len(BY_NAME) == len(ASKS), "names must be unique"
assert len(ASKS) >= 300, len(ASKS)
