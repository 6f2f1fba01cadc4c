"""`headwater chat`: a conversation with the running model, and what each answer took.

Reads lines from stdin, a terminal or not. `/new` forgets the conversation, `/quit` or the end of
input ends it; Ctrl-C during an answer stops that answer alone, by hanging up.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cluster import config_sources, running
from cluster.ask import Answer, ChatRequest, ChatStream, Message, get_json
from cluster.errors import AnswerError

PROMPT = "> "
HELP = "/new forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer."
NEW, QUIT = "/new", "/quit"


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends; 1 if an answer failed and nobody was there to see it.

    Raises NotRunningError, and AnswerError for an endpoint that does not name its model.
    """
    endpoint, model = _where(arguments)
    by_hand = sys.stdin.isatty()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    conversation = Conversation(
        endpoint,
        model,
        _write,
        system=arguments.system,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
    )
    if by_hand:
        _write(f"{model} at {endpoint}. {HELP}\n")
    try:
        for line in _typed_lines() if by_hand else sys.stdin:
            if not conversation.take(line):
                break
    except KeyboardInterrupt:  # at the prompt: the end, on a line of its own
        _write("\n")
        raise
    return 1 if conversation.failures and not by_hand else 0


@dataclass(slots=True)
class Conversation:
    """The history, and how each line goes on with it."""

    endpoint: str
    model: str
    write: Callable[[str], object]
    system: str | None = None
    max_tokens: int = 512
    temperature: float = 0.2
    turns: list[Message] = field(default_factory=list)
    failures: int = 0

    def take(self, line: str) -> bool:
        """Obey or answer one line; False ends the conversation. Mutates the history."""
        words = line.strip()
        if words == QUIT:
            return False
        if words == NEW:
            self.turns.clear()
            self.write("The conversation is forgotten.\n")
        elif words:
            self._answer(words)
        return True

    def _answer(self, question: str) -> None:
        """Stream an answer. The history keeps it, and what came of a stopped one."""
        asked = [*self.turns, Message("user", question)]
        system = [Message("system", self.system)] if self.system else []
        request = ChatRequest(self.model, [*system, *asked], self.max_tokens, self.temperature)
        how = ""
        try:
            with ChatStream(self.endpoint, request) as stream:
                try:
                    for text in stream:
                        self.write(text)
                except KeyboardInterrupt:
                    how = "stopped; "
            answer = stream.answer()
        except AnswerError as failed:
            self.failures += 1
            hint = f" ({NEW} forgets the conversation)" if self.turns else ""
            self.write(f"\nerror: {failed}{hint}\n")
            return
        if answer.text:
            self.turns = [*asked, Message("assistant", answer.text)]
        self.write(f"\n[{how}{figures(answer)}]\n")


def figures(answer: Answer) -> str:
    """TTFT, tokens/s, prompt and cached tokens, as far as they are known."""
    parts = [f"TTFT {answer.ttft_s * 1e3:.0f} ms" if answer.text else "no text"]
    if answer.tokens_per_s is not None:
        parts.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if answer.usage is not None:
        made = answer.usage.completion_tokens
        parts.append(f"{made} token{'' if made == 1 else 's'}")
        parts.append(
            f"prompt {answer.usage.prompt_tokens} tokens, {answer.usage.cached_tokens} cached"
        )
    if answer.finish_reason == "length":
        parts.append("cut at --max-tokens")
    return ", ".join(parts)


def _where(arguments: argparse.Namespace) -> tuple[str, str]:
    """Endpoint and model: of --endpoint, which is asked for its first one, or of what runs here."""
    if arguments.endpoint is None:
        found = running.read(config_sources.load(arguments).config.state.dir)
        return found.endpoint, found.model
    endpoint = arguments.endpoint.rstrip("/").removesuffix("/v1")
    try:
        models = get_json(endpoint, "/v1/models")
    except AnswerError as failed:
        raise AnswerError(
            f"{failed}. Is it up? ./headwater serve starts one here, and chat without --endpoint "
            "finds it"
        ) from failed
    try:
        return endpoint, str(models["data"][0]["id"])
    except (LookupError, TypeError) as odd:
        raise AnswerError(f"{endpoint}/v1/models names no model") from odd


def _typed_lines() -> Iterator[str]:
    """Lines from a terminal, with its line editing."""
    import readline  # noqa: F401 - input() uses it when it is loaded

    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            _write("\n")
            return


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
