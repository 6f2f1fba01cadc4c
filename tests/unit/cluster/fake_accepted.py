"""A cluster for the accept command's checks, in which failures can be planted one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.accept_client import Question, Reply
from cluster.demo_client import Worker
from cluster.errors import AnswerError, KillRefusedError

BLOCK = 16
SLOT_BYTES = 1_000_000
WORDS = 32_000
VICTIM = Worker("d-1", "decode", 200, "ready")


def next_token(tokens: Sequence[int]) -> int:
    """What the fake model says next: a function of everything so far."""
    digest = hashlib.sha256(repr(list(tokens)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % WORDS


class FakeAccepted:
    """Answers by next_token; hands long cold prompts from p-1 to d-1; caches by salt and prompt.

    Planted: flags below. wrong_after: from this token of a warm answer on, another one. Added to
    logprobs: drift to those of warm answers, handed_drift of long ones, noise of single tokens.
    tie: what is wrong is as likely as what is right.
    """

    def __init__(self) -> None:
        self.wrong_after: int | None = None
        self.scratch_differs = False
        self.tie = False
        self.tie_at = 0
        self.drift_nats = 0.0
        self.handed_drift_nats = 0.0
        self.noise_nats = 0.0
        self.reuses = True
        self.hands_over = True
        self.hands_short_ones_over = False
        self.loads = True
        self.resumed_tokens = 1
        self.failed_blocks = 0
        self.load_s = 0.01
        self.slot_bytes = SLOT_BYTES
        self.leaked: dict[str, int] = {}
        self.scan_differs = False
        self.node_error = ""
        self.holds_blocks = 0
        self.worker_state = "ready"
        self.silent_for = 0
        self.kill_refusal: KillRefusedError | None = None
        self.only_one_worker = False
        self.after_kill = "resumed"
        self.killed: list[Worker] = []
        self.seen: set[tuple[str, tuple[int, ...]]] = set()
        self.records: dict[str, dict[str, Any]] = {}
        self.salts: list[str] = []

    # ---- AcceptClient -------------------------------------------------------------------------

    def context_tokens(self) -> int:
        return 1024

    def complete(
        self, question: Question, on_tokens: Callable[[Reply], None] | None = None
    ) -> Reply:
        prompt = question.prompt
        ids = [ord(sign) for sign in prompt] if isinstance(prompt, str) else list(prompt)
        key = (question.salt, tuple(ids))
        warm = key in self.seen and self.reuses
        self.seen.add(key)
        self.salts.append(question.salt)
        reply = Reply(f"trace-{len(self.records)}", list(ids))
        reply.cached_tokens = len(ids) // BLOCK * BLOCK if warm else 0
        self.records[reply.trace_id] = self._record(question, warm=warm)
        scratch = question.exactly_tokens == 1
        for number in range(question.exactly_tokens):
            token = next_token([*ids, *reply.tokens])
            wrong = warm and self.wrong_after is not None and number >= self.wrong_after
            if wrong or (scratch and self.scratch_differs):
                self._say_wrong(reply, token)
            else:
                other = (token + 1) % WORDS
                gap = 0.01 if self.tie else 3.0
                drift = self.drift_nats if warm else 0.0
                drift += self.noise_nats if scratch else 0.0
                drift += self.handed_drift_nats if not scratch and self._is_long(question) else 0.0
                reply.tokens.append(token)
                reply.logprobs.append({token: -0.5 - drift, other: -0.5 - drift - gap})
            if on_tokens is not None:
                on_tokens(reply)
            if self.killed and on_tokens is not None and self._ends_badly(reply):
                break
        return reply

    def record(self, trace_id: str) -> Mapping[str, Any]:
        return self.records[trace_id]

    def status(self) -> Mapping[str, Any]:
        self.silent_for -= 1
        if self.silent_for > 0:
            raise AnswerError("nobody there")
        in_flight = {"prefill": 0, "decode": self.leaked.get("flow", 0)}
        load = {"in_flight": self.leaked.get("router", 0), "queued_tokens": 0}
        same = {
            "running": self.leaked.get("running", 0),
            "waiting": 0,
            "total_blocks": 90,
            "free_blocks": 90 - self.holds_blocks,
            "slot_bytes": self.slot_bytes,
        }
        workers = [
            {"id": name, "role": role, "pid": pid, "state": self.worker_state, **same}
            for name, role, pid in (("p-1", "prefill", 100), ("d-1", "decode", 200))
            if not (self.only_one_worker and role == "prefill")
        ]
        return {
            "workers": workers,
            "requests": {"in_flight": in_flight},
            "admission": {"in_flight": self.leaked.get("admission", 0)},
            "router": {"load": [{"worker": "d-1", **load}]},
        }

    def ledger(self) -> Sequence[Mapping[str, Any]]:
        if self.node_error:
            return [{"node": "n-1", "error": self.node_error}]
        names = ("free", "filling", "quarantined", "published", "leased_slots")
        counts = {name: self.leaked.get(name, 0) for name in names}
        scan = {**counts, "free": 1} if self.scan_differs else counts
        leases = [{}] * self.leaked.get("leases", 0)
        return [{"node": "n-1", "books": {**counts, "leases": leases}, "scan": scan}]

    def kill(self, worker: Worker) -> None:
        if self.kill_refusal:
            raise self.kill_refusal
        self.killed.append(worker)

    # ---- what it is made of -------------------------------------------------------------------

    def _is_long(self, question: Question) -> bool:
        """A prompt that is worth a hand-off."""
        return question.exactly_tokens > 1 and (
            len(question.prompt) > 200 or self.hands_short_ones_over
        )

    def _say_wrong(self, reply: Reply, token: int) -> None:
        other = (token + 1) % WORDS
        reply.tokens.append(other)
        reply.logprobs.append({other: -0.5, token: -0.51 if self.tie else -3.5})

    def _ends_badly(self, reply: Reply) -> bool:
        """What becomes of the stream whose worker was just killed. Mutates its record."""
        record = self.records[reply.trace_id]
        if self.after_kill == "lost":
            raise AnswerError("the connection ended before the answer did")
        if self.after_kill != "complete" and len(record["attempts"]) == 1:
            record["attempts"][0]["ended_s"] = 1.0
            anew = self.after_kill == "anew"
            heir = attempt("p-1", "prefill", resumed=0 if anew else len(reply.tokens))
            record["attempts"].append(heir)
        if self.after_kill == "tie" and len(reply.tokens) == self.tie_at:
            reply.tokens[-1] = (reply.tokens[-1] + 1) % WORDS
            reply.logprobs[-1] = {reply.tokens[-1]: -0.5, reply.tokens[-1] - 1: -0.51}
        if self.after_kill == "other tokens":
            reply.tokens[-1] = (reply.tokens[-1] + 7) % WORDS
            reply.logprobs[-1] = {reply.tokens[-1]: -0.1}
        return False

    def _record(self, question: Question, *, warm: bool) -> dict[str, Any]:
        decision = {"reason": "short_prompt"}
        if warm or not self._is_long(question) or not self.hands_over:
            running = None if question.exactly_tokens > 50 else 1.0
            attempts = [attempt("d-1", "decode", ended_s=running)]
        else:
            attempts = [
                attempt("p-1", "prefill", published_blocks=20, publish_s=0.02),
                attempt(
                    *("d-1", "decode"),
                    resumed=self.resumed_tokens,
                    loaded_blocks=20 if self.loads else 0,
                    failed_blocks=self.failed_blocks,
                    load_s=self.load_s,
                ),
            ]
        return {"attempts": attempts, "decisions": [decision]}


def attempt(
    worker: str, role: str, *, resumed: int = 0, ended_s: float | None = 1.0, **kv: float
) -> dict[str, Any]:
    """One stay at a worker, as a record has it."""
    where = {"worker": worker, "role": role, "resumed_tokens": resumed}
    return {**where, "ended_s": ended_s, "kv": kv or None}
