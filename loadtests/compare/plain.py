"""Two plain vLLM servers behind round robin. Started by measuring.py.

Round robin is the load generator's: it sends request by request to one and the other in turn. A
proxy of ours would cost CPU that a balancer in production (in C, on another machine) does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from loadtests.compare.setups import Place, Running
from loadtests.sides import VllmServer

# Cached tokens are told by none of vLLM's servers unless asked.
TOLD = ("--enable-prompt-tokens-details",)


@dataclass(frozen=True, slots=True)
class TwoPlain:
    """As many plain servers as there are cores. budget: tokens a step; None for everybody's."""

    label: str
    place: Place
    budget: int | None = None
    mended: Sequence[str] = ()

    @property
    def tokens_a_step(self) -> int:
        return self.budget or self.place.limits.max_num_batched_tokens

    @property
    def title(self) -> str:
        return f"{len(self.place.cores)} plain vLLM, round robin, {self.tokens_a_step} a step"

    @property
    def how(self) -> str:
        return (
            f"{len(self.place.cores)} of vLLM's own servers, each engine bound to a core by "
            "VLLM_CPU_OMP_THREADS_BIND; the load generator asks them in turn; chunked prefill "
            f"with {self.tokens_a_step} tokens a step"
        )

    @contextmanager
    def start(self, folder: Path) -> Iterator[Running]:
        limits = replace(self.place.limits, max_num_batched_tokens=self.tokens_a_step)
        servers = [
            VllmServer(f"plain-{core}", limits, core=core, flags=TOLD) for core in self.place.cores
        ]
        with servers_up(servers, folder) as roots:
            yield Running(tuple(server.url for server in servers), limits.name, roots)


@contextmanager
def servers_up(servers: Sequence[VllmServer], folder: Path) -> Iterator[tuple[psutil.Process, ...]]:
    """All of them, started at once and ready."""
    with ExitStack() as stack:
        processes = [stack.enter_context(server.process(folder)) for server in servers]
        for server, process in zip(servers, processes, strict=True):
            server.wait(process)
        yield tuple(psutil.Process(process.pid) for process in processes)
