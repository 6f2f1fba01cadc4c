"""The checks of `headwater accept`: equality, hand-off, resume, bandwidth, ledger.

Called by the accept command with a client; unit tests plant a failure for each over a fake one. A
check that did not see what it is about has not passed: an answer that reused nothing says nothing
about reuse. What could not be looked at is NOT CHECKED, and the verdict says so.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cluster.accept_answers import BOUND_NATS_MAX, Comparison, bound_of, compare
from cluster.accept_client import AcceptClient, Question, Reply
from cluster.accept_ledger import faults_of
from cluster.demo_client import Worker
from cluster.errors import AnswerError, KillRefusedError

# Of the context; the rest is for the answer and a less frugal tokenizer.
PROMPT_SHARE, PROMPT_TOKENS_MAX = 0.5, 1200
LINE_TOKENS = 30
ANSWER_TOKENS, STORY_TOKENS = 24, 96
# Tokens of an answer that are computed again from nothing: right after a hand-off, and later.
RECOMPUTED = (1, 2, 6, 12, 20)
KILL_AFTER_TOKENS = 8
LEDGER_TIMEOUT_S, LEDGER_AFTER_KILL_S, POLL_S = 30.0, 120.0, 0.5
THINGS = ("lamps", "ropes", "barrels", "letters", "sheep", "nets", "bricks", "apples")
PLACES = ("harbour", "mill", "chapel", "market", "bridge", "orchard", "quarry", "inn")


class Result(StrEnum):
    """How a check ended."""

    PASSED = "PASS"
    FAILED = "FAIL"
    NOT_CHECKED = "NOT CHECKED"


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's outcome. figure: what was measured; why: what failed, or why it was not checked."""

    check: str
    result: Result
    figure: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer and its record."""

    reply: Reply
    record: Mapping[str, Any]

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        """Its stays at workers, in order."""
        attempts: Sequence[Mapping[str, Any]] = self.record["attempts"]
        return attempts

    def blocks(self, what: str) -> int:
        """A count of the attempts' reports, such as loaded_blocks, summed."""
        return sum(int((attempt["kv"] or {}).get(what) or 0) for attempt in self.attempts)

    def seconds(self, what: str) -> float:
        """A duration of the attempts' reports, summed."""
        return sum(float((attempt["kv"] or {}).get(what) or 0.0) for attempt in self.attempts)

    @property
    def is_handed_over(self) -> bool:
        """Its prompt was computed at one worker, and its answer went on at another."""
        roles = [attempt["role"] for attempt in self.attempts]
        workers = {attempt["worker"] for attempt in self.attempts}
        return roles == ["prefill", "decode"] and len(workers) > 1


@dataclass(slots=True)
class Acceptance:
    """One run over one cluster. floor_gb_s: slower moving of blocks fails."""

    client: AcceptClient
    nonce: str
    seeds: int
    floor_gb_s: float
    kill: bool
    progress: Callable[[str], object] = lambda _line: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    cold: list[Asked] = field(default_factory=list)
    warm: list[Asked] = field(default_factory=list)
    killed: bool = False
    bound_nats: float = bound_of(0.0)

    def run(self) -> tuple[Finding, ...]:
        """All checks, in order. Raises AnswerError where the cluster does not answer at all."""
        findings = [self.equality(), self.hand_off(), self.resume(), self.bandwidth()]
        return (*findings, self.ledger())

    def ask(self, prompt: str | Sequence[int], salt: str, tokens: int) -> Asked:
        """One answer with its record."""
        reply = self.client.complete(Question(prompt, f"{self.nonce} {salt}", tokens))
        return Asked(reply, self.client.record(reply.trace_id))

    # ---- equality -------------------------------------------------------------------------------

    def equality(self) -> Finding:
        """Cold, warm, and token by token from nothing: the same greedy answer."""
        wrong = self._measure_noise()
        ties, compared, drift_nats, scratch = 0, 0, 0.0, 0

        def note(what: str, found: Comparison) -> None:
            nonlocal ties, compared, drift_nats
            ties += found.tie
            compared += found.compared
            drift_nats = max(drift_nats, found.drift_nats)
            if found.wrong:
                wrong.append(f"{what}: {found.wrong}")

        for seed in range(self.seeds):
            self.progress(f"equality, prompt {seed + 1} of {self.seeds}")
            text = passage(f"{self.nonce} {seed}", self.client.context_tokens())
            cold = self.ask(text, f"cold {seed}", ANSWER_TOKENS)
            warm = self.ask(text, f"cold {seed}", ANSWER_TOKENS)
            self.cold.append(cold)
            self.warm.append(warm)
            bound = self.bound_nats
            note(f"prompt {seed + 1}, warm", compare(cold.reply, warm.reply, bound_nats=bound))
            for known in RECOMPUTED:
                alone = self._from_nothing(cold.reply, known, f"alone {seed}")
                if alone.blocks("loaded_blocks") or alone.reply.cached_tokens:
                    wrong.append(f"prompt {seed + 1}: a new cache salt found blocks")
                scratch += 1
                after = f"prompt {seed + 1}, from nothing after {known} tokens"
                note(after, compare(cold.reply, alone.reply, first=known, bound_nats=bound))
        if compared < self.seeds * ANSWER_TOKENS // 2:
            wrong.append("answers part too early to compare more")
        reused = sum(asked.reply.cached_tokens for asked in self.warm)
        if not all(asked.reply.cached_tokens for asked in self.warm):
            wrong.append("a repeated prompt reused nothing, so that this says little about reuse")
        if not all(asked.reply.prompt for asked in self.cold):
            wrong.append("the endpoint does not tell the prompt's token ids")
        figure = (
            f"{self.seeds} prompts cold and warm, {scratch} tokens from nothing: {compared} tokens "
            f"compared, {ties} ties, logprobs within {drift_nats:.3f} nats "
            f"of {self.bound_nats:.3f} allowed; {reused} tokens reused"
        )
        return _finding("equality", wrong, figure)

    def _measure_noise(self) -> list[str]:
        """How far logprobs drift where nothing is reused or moved, so that the rest has a bound.

        Short prompts stay with one worker; each token is compared with the same one from nothing.
        Mutates the bound; gives what keeps it from being one.
        """
        noise_nats, seen = 0.0, 0
        for seed in range(self.seeds):
            self.progress(f"arithmetic, prompt {seed + 1} of {self.seeds}")
            short = self.ask(
                passage(f"{self.nonce} short {seed}", 0), f"short {seed}", ANSWER_TOKENS
            )
            if len(short.attempts) > 1 or short.blocks("loaded_blocks"):
                continue
            for known in RECOMPUTED:
                alone = self._from_nothing(short.reply, known, f"short alone {seed}")
                found = compare(short.reply, alone.reply, first=known, bound_nats=BOUND_NATS_MAX)
                if found.wrong:
                    return [f"without any reuse: {found.wrong}"]
                noise_nats = max(noise_nats, found.drift_nats)
                seen += found.compared
        self.bound_nats = bound_of(noise_nats)
        if not seen:
            return ["no short answer was made by one worker alone, to tell noise from wrong blocks"]
        if self.bound_nats > BOUND_NATS_MAX:
            return [
                f"logprobs drift by {noise_nats:.3f} nats without any reuse: none can be judged"
            ]
        return []

    def _from_nothing(self, reply: Reply, known: int, salt: str) -> Asked:
        """The token after the first `known` ones, by one worker, with blocks that nobody has."""
        return self.ask([*reply.prompt, *reply.tokens[:known]], f"{salt} {known}", 1)

    # ---- hand-off -------------------------------------------------------------------------------

    def hand_off(self) -> Finding:
        """Of the cold prompts: computed at one worker, gone on with at another, from its blocks."""
        handed = [asked for asked in self.cold if asked.is_handed_over]
        wrong = []
        if not handed:
            wrong.append(
                f"none of {len(self.cold)} long prompts was handed over: {self._reasons()}"
            )
        for asked in handed:
            last = asked.attempts[-1]
            if not (last["kv"] or {}).get("loaded_blocks"):
                wrong.append(f"{last['worker']} loaded nothing of a prompt that was handed to it")
            if not last["resumed_tokens"]:
                wrong.append(f"{last['worker']} was not given the first token")
        failed = sum(asked.blocks("failed_blocks") for asked in [*self.cold, *self.warm])
        if failed:
            wrong.append(f"{failed} blocks could not be loaded and were computed again")
        blocks = sum(asked.blocks("loaded_blocks") for asked in handed)
        pulled = sum(asked.blocks("pulled_blocks") for asked in handed)
        figure = (
            f"{len(handed)} of {len(self.cold)} cold prompts, {blocks} blocks loaded, {pulled} of "
            "them from another node"
        )
        return _finding("hand-off", wrong, figure)

    def _reasons(self) -> str:
        reasons = {str(d.get("reason")) for asked in self.cold for d in asked.record["decisions"]}
        return f"the router's reasons: {', '.join(sorted(reasons))}" if reasons else "no decision"

    # ---- resume ---------------------------------------------------------------------------------

    def resume(self) -> Finding:
        """A worker is killed in mid-stream; the stream goes on as if nothing had been."""
        if not self.kill:
            return Finding("resume", Result.NOT_CHECKED, "", "it kills a worker: give --kill")
        self.progress("resume: a worker is killed in mid-stream")
        text = f"({self.nonce}) Some people say that ships need lighthouses, because"
        whole = self.client.complete(Question(text, f"{self.nonce} whole", STORY_TOKENS))
        victims: list[Worker] = []
        refused: list[str] = []

        def strike(reply: Reply) -> None:
            if len(reply.tokens) >= KILL_AFTER_TOKENS and not victims and not refused:
                try:
                    victim = self._victim(reply.trace_id)
                    self.client.kill(victim)
                except (KillRefusedError, AnswerError) as no:
                    refused.append(str(no))
                else:
                    victims.append(victim)

        question = Question(text, f"{self.nonce} killed", STORY_TOKENS)
        try:
            broken = self.client.complete(question, strike)
        except AnswerError as lost:
            if not victims:
                raise
            self.killed = True
            figure = f"{victims[0].worker} (pid {victims[0].pid}) killed"
            return Finding("resume", Result.FAILED, figure, f"the stream was lost: {lost}")
        if not victims:
            why = refused[0] if refused else "the answer came all at once"
            return Finding("resume", Result.NOT_CHECKED, "", f"no worker was killed: {why}")
        self.killed = True
        return self._resumed(victims[0], whole, broken)

    def _resumed(self, victim: Worker, whole: Reply, broken: Reply) -> Finding:
        attempts = self.client.record(broken.trace_id)["attempts"]
        last, found = attempts[-1], compare(whole, broken, bound_nats=self.bound_nats)
        figure = (
            f"{victim.worker} (pid {victim.pid}) killed; {last['worker']} went on after "
            f"{last['resumed_tokens']} tokens; {found.compared} of {STORY_TOKENS} compared"
            f"{', up to a tie' if found.tie else ''}"
        )
        if last["worker"] == victim.worker:
            why = "the answer was complete before the worker died"
            return Finding("resume", Result.NOT_CHECKED, figure, why)
        wrong = [found.wrong] if found.wrong else []
        if not last["resumed_tokens"]:
            wrong.append("the stream began anew instead of going on")
        elif found.tie and found.compared <= last["resumed_tokens"]:
            why = "the answers part at a tie before the worker's death: run it again"
            return Finding("resume", Result.NOT_CHECKED, figure, why)
        return _finding("resume", wrong, figure)

    def _victim(self, trace_id: str) -> Worker:
        """The decode worker that answers this request, where another one could go on."""
        attempts = self.client.record(trace_id)["attempts"]
        busy = {attempt["worker"] for attempt in attempts if attempt["ended_s"] is None}
        workers = [
            Worker(str(w["id"]), str(w["role"]), int(w["pid"]), str(w["state"]))
            for w in self.client.status()["workers"]
        ]
        if not any(one.state == "ready" and one.worker not in busy for one in workers):
            raise KillRefusedError("there is no second worker that could go on")
        for one in workers:
            if one.worker in busy and one.role == "decode":
                return one
        raise KillRefusedError("no decode worker is answering this request")

    # ---- bandwidth ------------------------------------------------------------------------------

    def bandwidth(self) -> Finding:
        """Bytes and seconds of publishing and loading, as the workers reported them."""
        sizes = {int(w.get("slot_bytes") or 0) for w in self.client.status()["workers"]} - {0}
        if len(sizes) != 1:
            why = f"the workers' blocks have {sorted(sizes)} bytes: which one was moved is unknown"
            return Finding("bandwidth", Result.FAILED, "", why)
        (block_bytes,) = sizes
        wrong, parts = [], []
        for what, blocks, seconds in (
            ("published", "published_blocks", "publish_s"),
            ("loaded", "loaded_blocks", "load_s"),
            ("pulled", "pulled_blocks", "pull_s"),
        ):
            # Only of reports that moved something: others' seconds are of waiting.
            some = [a for a in [*self.cold, *self.warm] if a.blocks(blocks)]
            count = sum(a.blocks(blocks) for a in some)
            took_s = sum(a.seconds(seconds) for a in some)
            if not count:
                if what != "pulled":  # which needs several nodes
                    wrong.append(f"no block was {what}")
                continue
            rate_gb_s = count * block_bytes / took_s / 1e9 if took_s > 0 else 0.0
            parts.append(f"{what} {count * block_bytes / 1e6:.0f} MB at {rate_gb_s:.2f} GB/s")
            if rate_gb_s < self.floor_gb_s:
                wrong.append(f"{what} at {rate_gb_s:.3f} GB/s, under {self.floor_gb_s:g}")
        return _finding("bandwidth", wrong, ", ".join(parts))

    # ---- ledger ---------------------------------------------------------------------------------

    def ledger(self) -> Finding:
        """Every book at its baseline, within a bound."""
        self.progress("ledger")
        timeout_s = LEDGER_AFTER_KILL_S if self.killed else LEDGER_TIMEOUT_S
        began_s = self.clock()
        while True:
            try:
                faults = faults_of(self.client.status(), self.client.ledger())
            except AnswerError as silent:
                faults = [str(silent)]
            waited_s = self.clock() - began_s
            if not faults:
                return Finding("ledger", Result.PASSED, f"clean after {waited_s:.1f} s")
            if waited_s > timeout_s:
                faults.append("requests of others count too: run this on an idle cluster")
                return _finding("ledger", faults, f"not clean after {waited_s:.0f} s")
            self.sleep(POLL_S)


def verdict(findings: Sequence[Finding]) -> str:
    """One line."""
    failed = [f.check for f in findings if f.result is Result.FAILED]
    unseen = [f.check for f in findings if f.result is Result.NOT_CHECKED]
    passed = [f.check for f in findings if f.result is Result.PASSED]
    rest = f"; not checked: {', '.join(unseen)}" if unseen else ""
    if failed:
        return f"NOT ACCEPTED: {', '.join(failed)} failed{rest}"
    return f"ACCEPTED: {', '.join(passed)} passed{rest}"


def passage(name: str, context_tokens: int) -> str:
    """A long text that no cache holds, and that a model goes on with surely: it counts things."""
    room = min(PROMPT_TOKENS_MAX, int(context_tokens * PROMPT_SHARE))
    lines = max(2, room // LINE_TOKENS)
    chance = random.Random(name)
    book = [f"Inventory {name}."]
    book += [
        f"{number}. {chance.randint(2, 90)} {chance.choice(THINGS)} were carried from the "
        f"{chance.choice(PLACES)} to the {chance.choice(PLACES)}."
        for number in range(1, lines + 1)
    ]
    return "\n".join([*book, f"{lines + 1}."])


def _finding(check: str, wrong: Sequence[str], figure: str) -> Finding:
    return Finding(check, Result.FAILED if wrong else Result.PASSED, figure, "; ".join(wrong))
