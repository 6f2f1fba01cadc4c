"""What a running load test looks like meanwhile: a small table on a terminal, else a line at times.

Called by loadtests/load/execution.py; `Progress` is the runner's Watch. Must not: cost what would
show in the figures; a table is drawn once a second, from the answers of the last seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median

from rich.console import Console
from rich.live import Live
from rich.table import Table

from loadtests.load.metrics import tpot_ms, ttft_ms
from loadtests.load.records import Outcome, Request, Sample
from loadtests.load.runner import Plan

RECENT_S = 10.0
DRAW_INTERVAL_S = 1.0
LINE_INTERVAL_S = 10.0
_MINUTE_S = 60


@dataclass(slots=True)
class Progress:
    """What has happened so far. clock: seconds since the run began."""

    total: int
    plan: Plan
    clock: Callable[[], float]
    in_flight: int = 0
    ended_total: int = 0
    failures: Counter[Outcome] = field(default_factory=Counter)
    _sent_s: deque[float] = field(default_factory=deque)
    _recent: deque[Sample] = field(default_factory=deque)

    def sent(self, request: Request, at_s: float) -> None:  # noqa: ARG002
        """Mutates."""
        self.in_flight += 1
        self._sent_s.append(at_s)

    def ended(self, sample: Sample) -> None:
        """Mutates."""
        self.in_flight -= 1
        self.ended_total += 1
        if sample.outcome is Outcome.OK:
            self._recent.append(sample)
        else:
            self.failures[sample.outcome] += 1

    def figures(self) -> dict[str, str]:
        """By name, as text: of the last RECENT_S seconds where it is a rate or a latency."""
        now_s = self.clock()
        self._forget_before(now_s - RECENT_S)
        span_s = max(min(now_s, RECENT_S), 1e-9)
        tpots = [value for value in map(tpot_ms, self._recent) if value is not None]
        failed = ", ".join(f"{count} {outcome}" for outcome, count in self.failures.items())
        return {
            "time": _clock_text(now_s) + (" (warm-up)" if now_s < self.plan.warmup_s else ""),
            "left": self._left(now_s),
            "rate": f"{len(self._sent_s) / span_s:.2f}/s",
            "in flight": str(self.in_flight),
            "ended": f"{self.ended_total} of {self.total}",
            "TTFT p50": _ms([ttft_ms(sample) for sample in self._recent]),
            "TPOT p50": _ms(tpots),
            "errors": failed or "none",
        }

    def line(self) -> str:
        """All of it in one line."""
        return ", ".join(f"{name} {text}" for name, text in self.figures().items())

    def table(self) -> Table:
        """All of it for a terminal."""
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, text in self.figures().items():
            table.add_row(name, text)
        return table

    def _forget_before(self, at_s: float) -> None:
        while self._sent_s and self._sent_s[0] < at_s:
            self._sent_s.popleft()
        while self._recent and self._recent[0].ended_s < at_s:
            self._recent.popleft()

    def _left(self, now_s: float) -> str:
        """To the end of sending where it is known, else by the pace so far."""
        last_s = self.plan.last_send_s
        if last_s is not None:
            return _clock_text(max(0.0, last_s - now_s))
        if not self.ended_total:
            return "?"
        return "about " + _clock_text(now_s / self.ended_total * (self.total - self.ended_total))


@asynccontextmanager
async def shown(progress: Progress, console: Console) -> AsyncIterator[None]:
    """Shows it until the block ends: redrawn on a terminal, line by line elsewhere."""
    is_live = console.is_terminal and not console.is_dumb_terminal
    drawing = asyncio.create_task(_draw(progress, console) if is_live else _say(progress, console))
    try:
        yield
    finally:
        drawing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await drawing


async def _draw(progress: Progress, console: Console) -> None:
    with Live(progress.table(), console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(DRAW_INTERVAL_S)
            live.update(progress.table(), refresh=True)


async def _say(progress: Progress, console: Console) -> None:
    while True:
        await asyncio.sleep(LINE_INTERVAL_S)
        console.print(progress.line(), soft_wrap=True, highlight=False)


def _ms(values: list[float]) -> str:
    return f"{median(values):.0f} ms (n={len(values)})" if values else "-"


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), _MINUTE_S)
    return f"{minutes}:{rest:02d}"
