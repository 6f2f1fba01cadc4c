"""The engine thread of a worker: takes attempts from an inbox, steps the engine, gives outputs.

One thread owns the engine; everything else reaches it through the inbox. Called by engine_server.
Any exception in it ends the process at once (DESIGN D2): a worker that is not sure of its state
must not go on. The thread turns at least twice a second, idle or not, unless a step takes longer:
``stalled_s`` is how others see that it lives. Must not know sockets, Ray or vLLM.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deployments.engine.errors import MalformedBlob, RequestRejected
from deployments.engine.settings import EngineSettings
from deployments.links import frames
from deployments.workers.step_totals import StepTotals
from deployments.workers.worker_held import ledger_of_worker
from deployments.workers.worker_load import WorkerLoad
from kvcache import events

if TYPE_CHECKING:  # vLLM takes seconds to import, and the loop needs none of it
    from deployments.engine.inprocess import InprocessEngine
    from deployments.engine.messages import EngineCoreOutput

log = logging.getLogger("headwater.engine")

EXIT_ENGINE_FAILED = 70
IDLE_POLL_S = 0.5
PENDING_IO_POLL_S = 0.001
AUDIT_INTERVAL_S = 5.0  # between two digests of the prefix cache, while there is nothing to do
AUDIT_BUSY_INTERVAL_S = 60.0  # and while there is: one walks over all blocks, 0.2 us each


@dataclass(slots=True)
class _Attempt:
    owner: str
    received_s: float
    first_token: bool = False
    is_audit: bool = False


@dataclass(slots=True)
class StepDelivery:
    """What one step gives to one ingress."""

    ingress: str
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    timings: list[frames.Timing] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoopSinks:
    """Where results go; called in the engine thread, must be thread-safe and quick."""

    deliver: Callable[[list[StepDelivery], frames.Load], None]
    send: Callable[[str | None, frames.Message], None]  # None: to every ingress


class EngineLoop:
    """Builds and runs one engine in a thread of its own."""

    audit_interval_s = AUDIT_INTERVAL_S
    audit_busy_interval_s = AUDIT_BUSY_INTERVAL_S

    def __init__(
        self,
        settings: EngineSettings,
        build: Callable[[EngineSettings], InprocessEngine],
        sinks: LoopSinks,
        *,
        queue_max: int,
        cores: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The clock must be the engine's (InprocessEngine.first_scheduled_s)."""
        self._settings = settings
        self._clock = clock
        self._build = build
        self._sinks = sinks
        self._queue_max = queue_max
        self._cores = tuple(cores)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._attempts: dict[str, _Attempt] = {}
        self._prefetching: dict[str, str] = {}  # hand-off -> the ingress that it is for
        self._event_sequence = 0
        self._digests = 0
        self._audited_s = self._clock()
        self._running = True
        self._build_error: BaseException | None = None
        self._built = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._load = WorkerLoad(settings.max_num_seqs)
        self.engine: InprocessEngine
        self.load_when_built = frames.Load()
        self.slab_peer = ""  # where other nodes read our node's slab; the worker keeps it true
        self.incarnation = os.urandom(8).hex()
        self.progress_s = self._clock()

    # ---- called from any thread -------------------------------------------------------------

    def start(self) -> None:
        """Begin building the engine."""
        self._thread.start()

    def wait_built(self) -> None:
        """Block until the engine stands. Raises what building it raised."""
        self._built.wait()
        if self._build_error is not None:
            raise self._build_error

    def submit(self, owner: str, message: frames.Submit) -> None:
        """Run an attempt for an ingress."""
        self._inbox.put(lambda: self._add(owner, message))

    def abort(self, owner: str, attempts: list[str]) -> None:
        """Stop attempts; those that are unknown or another ingress's are ignored."""
        self._inbox.put(lambda: self._abort(owner, attempts))

    def abort_all(self) -> None:
        """Stop what is here, whoever's it is: this worker ends."""
        self._inbox.put(self._abort_everybody)

    def end_handoffs(self, handoffs: list[str]) -> None:
        """Release hand-off leases that nobody will take over."""
        self._inbox.put(lambda: self._end_handoffs(handoffs))

    def prefetch(self, owner: str, message: frames.Prefetch) -> None:
        """Take a hand-off's blocks over from another node while prefill computes them."""
        self._inbox.put(lambda: self._prefetch(owner, message))

    def owner_joined(self, owner: str) -> None:
        """A new ingress: tell it our load, and what this engine's prefix cache holds."""
        self._inbox.put(lambda: self._send_snapshot(owner))

    def owner_left(self, owner: str) -> None:
        """An ingress is gone: what it asked for is aborted (fencing on this side)."""
        self._inbox.put(lambda: self._abort_all(owner))

    def tell_ledger(self, owner: str) -> None:
        """Say what is held here, for whom and how long, once the thread turns."""
        self._inbox.put(lambda: self._sinks.send(owner, self._ledger()))

    def stop(self) -> None:
        """End the thread after the current step."""
        self._running = False
        self._inbox.put(lambda: None)

    def wait_ended(self, timeout_s: float) -> None:
        """Block until the thread has ended its engine, for at most so long."""
        self._thread.join(timeout_s)

    @property
    def idle(self) -> bool:
        """Whether no attempt is at this worker."""
        return not self._attempts

    @property
    def attempts(self) -> int:
        """How many are at this worker."""
        return len(self._attempts)

    def stalled_s(self) -> float:
        """Seconds since the loop last turned: the age of the step that it is in, or nearly 0."""
        return self._clock() - self.progress_s

    @property
    def steps(self) -> StepTotals:
        """What the engine's steps added up to."""
        return self._load.steps

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if len(self._cores) > 1:
                # Before the build, so that all compute threads inherit it; a single core is set
                # after it (settings.core), since the build itself may use all.
                os.sched_setaffinity(0, self._cores)
            self.engine = self._build(self._settings)
            warm_s = self.engine.warm_up()
            log.info("engine warm after %.1f s", warm_s)
        except BaseException as error:  # noqa: BLE001 - handed to wait_built's caller
            self._build_error = error
            self._built.set()
            return
        self.load_when_built = self.load()
        self.progress_s = self._clock()  # the build is no standstill
        self._built.set()
        try:
            while self._running:
                self._turn()
            self.engine.shutdown()
        except BaseException:
            log.exception("engine thread failed; this worker ends now")
            logging.shutdown()
            os._exit(EXIT_ENGINE_FAILED)

    def _turn(self) -> None:
        self.progress_s = self._clock()
        self._take_inbox()
        if not self.engine.has_work():
            self._send_cache_events()
            self._sinks.deliver([], self.load())  # the agent may have gone or come meanwhile
            return
        began_s = self._clock()
        result = self.engine.step()
        self._load.stepped(result, began_s, self._clock())
        self._hand_out(result.outputs)
        self._hand_back(result.refused)
        self._send_cache_events()
        if result.pending_io and not result.scheduled_tokens:
            self._wait_inbox(PENDING_IO_POLL_S)

    def _take_inbox(self) -> None:
        """Run what came in; wait for something when the engine has nothing to do."""
        if not self.engine.has_work():
            self._wait_inbox(IDLE_POLL_S)
        while not self._inbox.empty():
            self._inbox.get()()

    def _wait_inbox(self, timeout_s: float) -> None:
        try:
            self._inbox.get(timeout=timeout_s)()
        except queue.Empty:
            return

    # ---- attempts ---------------------------------------------------------------------------

    def _add(self, owner: str, message: frames.Submit) -> None:
        counts = self.engine.counts()
        # Not for a stream that has begun, elsewhere or at prefill: its client is served already.
        if counts.waiting >= self._queue_max and not message.resume_tokens:
            reason = f"its queue of {self._queue_max} is full"
            self._sinks.send(owner, frames.Rejected(message.attempt, reason, client_fault=False))
            return
        try:
            request = self.engine.decode_request(message.request)
            transfer = {
                "handoff": message.handoff,
                "publish_handoff": message.role == "prefill" and message.handoff is not None,
                "pull_from": message.pull_from,
                "publishes": not message.is_audit,
            }
            self._attempts[message.attempt] = _Attempt(
                owner, self._clock(), is_audit=message.is_audit
            )
            self.engine.add(request, message.resume_tokens, transfer)
            self._prefetching.pop(message.handoff or "", None)  # taken over
        except (RequestRejected, MalformedBlob) as refused:
            self._attempts.pop(message.attempt, None)
            self._sinks.send(
                owner, frames.Rejected(message.attempt, str(refused), client_fault=True)
            )
            return

    def _prefetch(self, owner: str, message: frames.Prefetch) -> None:
        self._prefetching[message.handoff] = owner
        self.engine.prefetch(message.handoff, message.hashes, message.pull_from)

    def _end_handoffs(self, handoffs: list[str]) -> None:
        for handoff in handoffs:
            self._prefetching.pop(handoff, None)
        self.engine.end_handoffs(handoffs)

    def _abort(self, owner: str, attempts: list[str]) -> None:
        known = [a for a in attempts if a in self._attempts and self._attempts[a].owner == owner]
        for attempt in known:
            stage = self.engine.status_of(attempt)
            self._sinks.send(owner, frames.Aborted(attempt, stage, self._load.steps.steps))
            del self._attempts[attempt]
        self.engine.abort(known)

    def _abort_all(self, owner: str) -> None:
        self._abort(owner, [a for a, known in self._attempts.items() if known.owner == owner])
        for handoff in [key for key, whose in self._prefetching.items() if whose == owner]:
            self._end_handoffs([handoff])

    def _abort_everybody(self) -> None:
        owners = {one.owner for one in self._attempts.values()} | set(self._prefetching.values())
        for owner in owners:
            self._abort_all(owner)

    def _hand_out(self, outputs: list[EngineCoreOutput]) -> None:
        by_owner: dict[str, StepDelivery] = {}
        for output in outputs:
            attempt = self._attempts.get(output.request_id)
            if output.prefill_stats is not None and not (attempt and attempt.is_audit):
                stats = output.prefill_stats
                self._load.prompt(stats.num_prompt_tokens, stats.num_cached_tokens)
            if attempt is None:
                continue  # aborted: nobody waits for it
            delivery = by_owner.setdefault(attempt.owner, StepDelivery(attempt.owner))
            delivery.outputs.append(output)
            if output.new_token_ids and not attempt.first_token:
                attempt.first_token = True
                delivery.timings.append(self._timing(output.request_id, attempt))
            if output.finish_reason is not None:
                del self._attempts[output.request_id]
        self._sinks.deliver(list(by_owner.values()), self.load())

    def _hand_back(self, refused: list[RequestRejected]) -> None:
        """Tell of requests that the engine found to be impossible after it had taken them."""
        for refusal in refused:
            attempt = self._attempts.pop(refusal.request_id, None)
            if attempt is not None:
                message = frames.Rejected(refusal.request_id, str(refusal), client_fault=True)
                self._sinks.send(attempt.owner, message)

    def _timing(self, name: str, attempt: _Attempt) -> frames.Timing:
        now_s = self._clock()
        scheduled_s = self.engine.first_scheduled_s(name) or now_s
        publish_s = self.engine.publish_wait_s()
        return frames.Timing(
            name,
            queue_s=scheduled_s - attempt.received_s,
            compute_s=now_s - scheduled_s - publish_s,
            publish_s=publish_s,
        )

    def load(self) -> frames.Load:
        """The worker's load now. Engine thread only."""
        engine = self.engine
        return self._load.now(engine.counts(), engine.kv_stats(), self.slab_peer, self._clock())

    def _ledger(self) -> frames.WorkerLedger:
        now_s = self._clock()
        attempts = [
            frames.AttemptHeld(name, one.owner, self.engine.status_of(name), now_s - one.received_s)
            for name, one in self._attempts.items()
        ]
        return ledger_of_worker(attempts, self.engine.kv_ledger(), now_s)

    # ---- the engine's own prefix cache ------------------------------------------------------

    def _send_cache_events(self) -> None:
        changed = self.engine.take_cache_events()
        if changed:
            self._send_batch(changed)
        is_busy = self.engine.has_work()
        interval_s = self.audit_busy_interval_s if is_busy else self.audit_interval_s
        if self._clock() - self._audited_s >= interval_s:
            self._send_digest()

    def _send_batch(self, changed: Sequence[events.BlockEvent]) -> None:
        self._event_sequence += 1
        batch = events.EventBatch(
            source=events.engine_source(self._settings.owner),
            incarnation=self.incarnation,
            sequence=self._event_sequence,
            model=self._settings.served_model,
            events=tuple(changed),
        )
        self._sinks.send(None, frames.CacheEvents(events.encode(batch)))

    def _send_digest(self) -> None:
        """What the engine holds by its own word: each ingress compares it with what it was told."""
        self._audited_s = self._clock()
        self._digests += 1
        held = set(self.engine.cache_snapshot())
        told = events.StreamDigest(
            source=events.engine_source(self._settings.owner),
            incarnation=self.incarnation,
            sequence=self._event_sequence,
            model=self._settings.served_model,
            blocks=len(held),
            digest=events.digest(held),
            number=self._digests,
        )
        self._sinks.send(None, frames.CacheEvents(events.encode(told)))

    def _send_snapshot(self, owner: str) -> None:
        self._send_cache_events()
        snapshot = events.Snapshot(
            source=events.engine_source(self._settings.owner),
            incarnation=self.incarnation,
            sequence=self._event_sequence,
            model=self._settings.served_model,
            hashes=tuple(self.engine.cache_snapshot()),
        )
        self._sinks.send(owner, frames.Ping(self.load()))
        self._sinks.send(owner, frames.CacheEvents(events.encode(snapshot)))
