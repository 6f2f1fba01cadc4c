"""The demo's scenes: cold and warm, a shared system prompt, a death in mid-sentence, its story.

Called by the demo command with a client; unit tests play the same scenes over a fake one. A scene
prints what it does and what it measured, and claims nothing that it has not seen.
"""

from __future__ import annotations

import random
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.ask import Answer, Message
from cluster.demo_client import DemoClient, Worker
from cluster.errors import AnswerError, KillRefusedError

WIDTH = 96
INDENT = "    "
# A quoted line is broken at the first space after so many characters.
QUOTE_WIDTH = 76
# A line of the log book below takes about so many tokens of the bundled model.
LINE_TOKENS = 30
LINES_MIN, LINES_MAX = 4, 56
# Leaves the other half of the context to the question, the answer and a less frugal tokenizer.
PROMPT_SHARE = 0.5
ANSWER_TOKENS = 24
STORY_TOKENS_MIN, STORY_TOKENS_MAX = 48, 96
KILL_AFTER_PIECES = 12
WINDS = ("north", "north-east", "east", "south", "south-west", "west")
SHIPS = ("a collier", "a mail steamer", "two luggers", "a barque under tow", "no ship at all")


@dataclass(slots=True)
class Stage:
    """What the scenes share. told: the request whose story ends the demo."""

    client: DemoClient
    write: Callable[[str], object]
    nonce: str
    clock: Callable[[], float] = time.monotonic
    told: str = ""
    column: int = field(default=0)

    def say(self, text: str) -> None:
        """A paragraph of narration."""
        self.write(textwrap.fill(text, WIDTH) + "\n")

    def quote(self, text: str) -> None:
        """Text of the model as it comes, indented and broken at spaces."""
        for sign in text.replace("\n", " "):
            if self.column == 0:
                self.write(INDENT)
            if sign == " " and self.column >= QUOTE_WIDTH:
                self.write("\n")
                self.column = 0
            elif sign != " " or self.column:
                self.write(sign)
                self.column += 1

    def end_quote(self) -> None:
        """The model's text is over."""
        self.write("\n")
        self.column = 0

    def ask(self, messages: Sequence[Message], *, max_tokens: int = ANSWER_TOKENS) -> Answer:
        """One whole answer, shown as it comes."""
        with self.client.stream(messages, min_tokens=1, max_tokens=max_tokens) as stream:
            for text in stream:
                self.quote(text)
            answer = stream.answer()
        self.end_quote()
        self.told = answer.trace_id
        return answer


@dataclass(frozen=True, slots=True)
class Scene:
    """A title and what happens."""

    title: str
    play: Callable[[Stage], None]


def perform(scenes: Sequence[Scene], stage: Stage) -> None:
    """Play the scenes in order. Raises AnswerError when the cluster does not answer."""
    for number, scene in enumerate(scenes, start=1):
        stage.write(f"\n{number}. {scene.title}\n\n")
        scene.play(stage)


def scenes(*, kill: bool) -> tuple[Scene, ...]:
    """The programme."""
    death = (Scene("A worker dies in mid-sentence", a_worker_dies),) if kill else ()
    return (
        Scene("The same long prompt, cold and warm", cold_and_warm),
        Scene("Two users share a system prompt", a_shared_system_prompt),
        *death,
        Scene("Why: the story of the last request", tell),
    )


def cold_and_warm(stage: Stage) -> None:
    """One prompt twice; only a fresh nonce makes sure that the first time is cold."""
    question = [
        Message("system", log_book(stage, "cold")),
        Message("user", "In one sentence: what does the keeper write about?"),
    ]
    stage.say("A keeper's log book, never seen before, and a question about it:")
    cold = stage.ask(question)
    stage.say(f"   cold: {figures(cold)}")
    stage.say("The very same again:")
    warm = stage.ask(question)
    stage.say(f"   warm: {figures(warm)}")
    if cached(warm) > cached(cold) and 0 < warm.ttft_s < cold.ttft_s:
        stage.say(
            f"The first token came {cold.ttft_s / warm.ttft_s:.1f} times sooner: {cached(warm)} "
            "tokens of the prompt were not computed again."
        )
    else:
        stage.say("Warm was no faster here; is something else keeping the workers busy?")


def a_shared_system_prompt(stage: Stage) -> None:
    """Two conversations that begin alike; the second finds what the first one computed."""
    system = Message("system", log_book(stage, "shared"))
    stage.say("Two people talk with the same assistant, whose instructions are long. Ann asks:")
    first = stage.ask([system, Message("user", "Ann here. Which wind is named most often?")])
    stage.say(f"   Ann: {figures(first)}")
    stage.say("Ben asks something else:")
    second = stage.ask([system, Message("user", "Ben here. Were there any ships at all?")])
    stage.say(f"   Ben: {figures(second)}")
    if cached(second) > cached(first):
        stage.say(
            f"Ben never asked before, and yet {cached(second)} tokens of his prompt were known: "
            "KV blocks have names, not owners."
        )
    else:
        stage.say("Ben found nothing cached: the blocks may have been evicted in between.")


def a_worker_dies(stage: Stage) -> None:
    """SIGKILL to the worker that is writing; the stream goes on elsewhere."""
    question = [
        Message("user", f"({stage.nonce}) Tell me in one paragraph why ships need lighthouses.")
    ]
    stage.say("A question with a longer answer. Watch it:")
    victim: Worker | None = None
    refused, pieces = "", 0
    last_s = pause_s = 0.0
    with stage.client.stream(
        question, min_tokens=STORY_TOKENS_MIN, max_tokens=STORY_TOKENS_MAX
    ) as stream:
        for text in stream:
            pieces += 1
            now_s = stage.clock()
            if victim:  # some pieces may have been on their way already
                pause_s = max(pause_s, now_s - last_s)
            stage.quote(text)
            if pieces == KILL_AFTER_PIECES:
                victim, refused = _kill(stage, stream.trace_id)
                stage.quote(f" [kill -9 {victim.pid}]" if victim else " [not killed]")
                now_s = stage.clock()
            last_s = now_s
        answer = stream.answer()
    stage.end_quote()
    stage.told = answer.trace_id
    if victim is None:
        reason = refused or "the answer was over before it could be"
        stage.say(f"No worker was killed: {reason}.")
        return
    heir = stage.client.attempts(stage.told)[-1]
    if heir.worker == victim.worker:
        stage.say(f"Worker {victim.worker} was killed, but its answer was complete already.")
        return
    stage.say(
        f"{victim.role} worker {victim.worker} (pid {victim.pid}) was killed; {heir.role} worker "
        f"{heir.worker} went on from the tokens so far. The longest pause was {pause_s:.1f} s, and "
        "the client saw one stream, without an error. A replacement is starting: ./headwater status"
    )


def tell(stage: Stage) -> None:
    """What `headwater explain` says of the last request."""
    stage.say(f"./headwater explain {stage.told}")
    for line in stage.client.story(stage.told).splitlines():
        indent = "    " + " " * (len(line) - len(line.lstrip()))
        stage.write(
            textwrap.fill(
                line.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent + "  "
            )
            + "\n"
        )


def log_book(stage: Stage, name: str) -> str:
    """A long text that no cache holds: it begins with the nonce, and its order depends on it."""
    room = int(stage.client.context_tokens() * PROMPT_SHARE / LINE_TOKENS)
    lines = max(LINES_MIN, min(LINES_MAX, room))
    chance = random.Random(f"{stage.nonce} {name}")
    book = [f"Log book {stage.nonce} {name}. You answer questions about it, briefly."]
    book += [
        f"Day {day}: wind from the {chance.choice(WINDS)}, swell of {chance.randint(1, 40)} feet, "
        f"{chance.choice(SHIPS)}, lamp lit at {chance.randint(4, 9)}."
        for day in range(1, lines + 1)
    ]
    return "\n".join(book)


def figures(answer: Answer) -> str:
    """TTFT, prompt and cached tokens."""
    told = f"first token after {answer.ttft_s * 1e3:.0f} ms"
    if answer.usage is None:
        return told
    return f"{told}, {answer.usage.cached_tokens} of {answer.usage.prompt_tokens} tokens cached"


def cached(answer: Answer) -> int:
    """Tokens of the prompt that were in a cache."""
    return 0 if answer.usage is None else answer.usage.cached_tokens


def _kill(stage: Stage, trace_id: str) -> tuple[Worker | None, str]:
    """End the worker that answers this request: it, or None and why not."""
    try:
        busy = {one.worker for one in stage.client.attempts(trace_id) if one.is_running}
        workers = stage.client.workers()
        found = [one for one in workers if one.worker in busy and one.role == "decode"]
        if not found:
            return None, "no decode worker is answering this request any more"
        if not any(one.state == "ready" and one.worker not in busy for one in workers):
            return None, "there is no second worker that could go on"
        stage.client.kill(found[0])
    except (AnswerError, KillRefusedError) as refused:
        return None, str(refused)
    return found[0], ""
