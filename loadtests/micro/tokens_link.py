"""The link alone: a counting worker's process at one end, WorkerLink and decoding at this end.

Called by tokens_servers as ``python -m loadtests.micro.tokens_link``: one JSON command a line on
standard input (LinkRun), one JSON answer a line on standard output (LinkSeen). What is measured is
all that a token passes between an engine's step and request_flow: engine loop, hand-over to the
event loop, encoding, LinkServer, TCP, WorkerLink, decoding.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass

import psutil
import uvloop
from vllm.sampling_params import SamplingParams

from deployments.engine.codec import decode_outputs, encode_request
from deployments.engine.messages import EngineCoreRequest
from deployments.links import frames
from deployments.links.link import LinkSettings, WorkerLink, open_link
from deployments.secret import read_secret
from loadtests.micro.counting import credit, prompt_of

WINDOW_TOKENS = 4096  # on their way at most: the server must not take this end for a slow one
WINDOW_STEPS_MIN = 4
RUN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class LinkRun:
    """One run over one link to the worker's process ``pid``."""

    port: int
    pid: int
    secret_file: str
    fifo: str
    streams: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """From the first token to the last; worker_us: CPU time of the worker's process, by frame."""

    tokens_per_s: float
    tokens_per_frame: float
    worker_us: float
    cpu_share: float


class _Reader:
    """Counts what comes over a link."""

    def __init__(self, run: LinkRun, credit_fd: int) -> None:
        self._credit_fd = credit_fd
        self._live = run.streams
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.tokens = self.frames = 0
        self.began_s: float | None = None

    def take(self, message: frames.Message) -> None:
        """One message of the worker."""
        if not isinstance(message, frames.Outputs):
            return
        if self.began_s is None:
            self.began_s = time.monotonic()
        outputs = decode_outputs(message.outputs)
        tokens = sum(len(output.new_token_ids) for output in outputs)
        self._live -= sum(output.finish_reason is not None for output in outputs)
        self.tokens += tokens
        self.frames += 1
        credit(self._credit_fd, tokens)
        if not self._live and not self.done.done():
            self.done.set_result(time.monotonic())


async def carry_out(run: LinkRun) -> LinkSeen:
    """One run."""
    secret = read_secret(run.secret_file)
    link = await open_link("127.0.0.1", run.port, "tokens", secret, {}, LinkSettings())
    credit_fd = os.open(run.fifo, os.O_RDWR)
    reader = _Reader(run, credit_fd)
    receiving = asyncio.create_task(link.run(reader.take))
    worker = psutil.Process(run.pid)
    cpu_s, worker_s = time.process_time(), sum(worker.cpu_times()[:2])
    try:
        _submit(link, run)
        async with asyncio.timeout(RUN_TIMEOUT_S):
            ended_s = await reader.done
    finally:
        link.close()
        await receiving
        os.close(credit_fd)
    assert reader.began_s is not None
    took_s = ended_s - reader.began_s
    return LinkSeen(
        tokens_per_s=reader.tokens / took_s,
        tokens_per_frame=reader.tokens / reader.frames,
        worker_us=1e6 * (sum(worker.cpu_times()[:2]) - worker_s) / reader.frames,
        cpu_share=(time.process_time() - cpu_s) / took_s,
    )


def _submit(link: WorkerLink, run: LinkRun) -> None:
    window_steps = max(WINDOW_STEPS_MIN, WINDOW_TOKENS // run.streams)
    for n in range(run.streams):
        request = EngineCoreRequest(
            request_id=f"cmpl-{os.urandom(16).hex()}-{n}~1",
            prompt_token_ids=prompt_of(run.streams, window_steps=window_steps),
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=run.tokens),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        blob = encode_request(request)
        link.send(frames.Submit(request.request_id, "decode", blob, [], None))


def main() -> None:
    """Serve commands until standard input ends."""
    for line in sys.stdin:
        seen = uvloop.run(carry_out(LinkRun(**json.loads(line))))
        sys.stdout.write(json.dumps(asdict(seen)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
