"""One engine of the overlap benchmark, in a process of its own, driven call by call.

Called by overlap.py. Times are time.monotonic(), which all processes of a machine share.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from deployments.engine.environment import prepare_environment

SAMPLE_S = 0.002
PENDING_S = 0.001
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}  # beside the product's


class EngineHost:
    """Lives in the child. Each public method is a call of the benchmark."""

    def __init__(self, settings: dict[str, Any]) -> None:
        # Imported here: the parent must stay free of vllm.
        from deployments.engine.inprocess import InprocessEngine
        from deployments.engine.settings import EngineSettings

        self._settings = EngineSettings(**settings)
        self._engine = InprocessEngine(self._settings)
        self._engine.warm_up()
        self._arrivals: list[tuple[float, int]] = []
        self._sampling: threading.Thread | None = None

    def hashes(self, ids: list[int]) -> list[bytes]:
        """Names of the prompt's full blocks."""
        from deployments.engine.hashing import block_hashes

        return block_hashes(ids, self._settings.block_size)

    def prefetch(self, handoff: str, hashes: list[bytes], pull_from: str) -> None:
        """Begin to take the blocks over; an empty pull_from takes none."""
        self._engine.prefetch(handoff, hashes, pull_from)

    def watch(self) -> None:
        """Note when blocks arrive, until the next first token."""
        self._arrivals = []
        self._sampling = threading.Thread(target=self._sample, daemon=True)
        self._sampling.start()

    def _sample(self) -> None:
        me, first = threading.current_thread(), self._arrived()
        while self._sampling is me:
            count = self._arrived() - first
            if not self._arrivals or self._arrivals[-1][1] != count:
                self._arrivals.append((time.monotonic(), count))
            time.sleep(SAMPLE_S)

    def _arrived(self) -> int:
        stats = self._engine.kv_stats()
        assert stats is not None
        return int(stats.blocks_prefetched_total + stats.blocks_pulled_total)

    def first_token(
        self, name: str, ids: list[int], resume: list[int], transfer: dict[str, Any]
    ) -> dict[str, Any]:
        """Run a request up to its first output token and end it: when, and what moved meanwhile.

        steps: (time, blocks published so far) after each step; arrivals: of watch().
        """
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        most = 1 if transfer["publish_handoff"] else 1 + len(resume)
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=ids,
            mm_features=None,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        began_s = time.monotonic()
        self._engine.add(request, resume, transfer)
        steps: list[tuple[float, int]] = []
        published = self._published()
        report: dict[str, Any] = {}
        tokens: list[int] = []
        while not tokens:
            result = self._engine.step()
            steps.append((time.monotonic(), self._published() - published))
            for output in result.outputs:
                tokens += output.new_token_ids
                report = (output.kv_transfer_params or {}).get("headwater", report)
            if result.pending_io:
                time.sleep(PENDING_S)
        token_s = time.monotonic()
        self._sampling = None
        while self._engine.has_work():
            self._engine.step()
        self._engine.reset_prefix_cache()
        return {
            "began_s": began_s,
            "token_s": token_s,
            "tokens": tokens,
            "steps": steps,
            "arrivals": self._arrivals,
            "report": report,
        }

    def _published(self) -> int:
        stats = self._engine.kv_stats()
        assert stats is not None
        return int(stats.blocks_published_total)

    def close(self) -> None:
        """End the engine."""
        self._engine.shutdown()


def _serve(pipe: Connection, settings: dict[str, Any]) -> None:
    os.environ.update(ENVIRONMENT)
    prepare_environment()
    host = EngineHost(settings)
    pipe.send(None)
    while True:
        call, positional = pipe.recv()
        pipe.send(getattr(host, call)(*positional))
        if call == "close":
            return


class Engine:
    """The parent's handle; it is being built until ready() returns."""

    def __init__(self, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it stands. Raises EOFError where it could not be built."""
        self._pipe.recv()

    def call(self, name: str, *positional: Any) -> Any:
        """Call a method of EngineHost; EOFError where the engine has died."""
        self._pipe.send((name, positional))
        return self._pipe.recv()

    def close(self) -> None:
        """End the child."""
        if self._process.is_alive():
            self.call("close")
        self._process.join(10)
