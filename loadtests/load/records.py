"""What a load test sends and what it saw: the records that all of loadtests speaks in.

Made by workloads and traces (Request), by the client (Sample) and the runner (Run); read by
metrics, reports and whatever compares. They hold no behaviour but their JSON form.

Times are seconds on one monotonic clock that is 0 when the run begins. Metrics are computed by
loadtests/load/metrics.py from samples, never stored in them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

FORMAT = "headwater-load/1"


class Outcome(StrEnum):
    """How a request ended. Only OK is a sample of latency and throughput; the rest are failures."""

    OK = "ok"
    REFUSED = "refused"  # an HTTP status other than 200
    ERROR_EVENT = "error_event"  # an error in the body or stream of a 200
    CUT = "cut"  # the connection ended before the end mark of the stream
    WRONG_LENGTH = "wrong_length"  # exact tokens were asked for, and another number came
    TIMED_OUT = "timed_out"  # nothing more was waited for
    UNREACHABLE = "unreachable"  # no connection
    MALFORMED = "malformed"  # an answer that is none of this API


@dataclass(frozen=True, slots=True)
class Request:
    """One request to be sent.

    prompt: token ids, or text. output_tokens: how many are asked for (exactly, unless the workload
    says otherwise). due_s: when an open loop sends it. follows: index of the request that has to
    end before it (a turn of a conversation), think_s later; None for none. group: the part of the
    workload it belongs to ("background", "long", "turn 3"), for tables by group.
    """

    index: int
    prompt: tuple[int, ...] | str
    output_tokens: int
    due_s: float = 0.0
    follows: int | None = None
    think_s: float = 0.0
    group: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk with content: when it was read, and how many tokens it carried (at least 1)."""

    at_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What came of one request.

    due_s: when it should have been sent; sent_s - due_s is the load generator's own lag. chunks:
    those with content, in order; empty and role-only ones are none. ended_s: the end mark, or the
    failure. input_tokens, output_tokens, cached_tokens: as the server's usage tells them, None
    where it does not. measured: sent within the measured window, not in the warm-up. detail: status
    and error text of a failure.
    """

    index: int
    group: str
    due_s: float
    sent_s: float
    ended_s: float
    outcome: Outcome
    chunks: tuple[Chunk, ...] = ()
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    measured: bool = True
    status: int | None = None
    detail: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class CpuShare:
    """CPU seconds of one process (tree) over the measured window.

    label: such as "decode worker", "engine", "load generator". engine: whether it is an inference
    engine, whose work is what is measured; the rest is overhead.
    """

    label: str
    cpu_s: float
    engine: bool


@dataclass(frozen=True, slots=True)
class Run:
    """One load test.

    conditions: what must be equal for two runs to be compared (workload, seed, lengths, arrival,
    model, machine, cores, exact tokens, window). facts: what is told and need not be equal (date,
    versions, URL, set-up, revision). window_s: begin and end of the measured window. cores: usable
    by the server and the generator together. cpu: empty where processes cannot be seen.
    """

    label: str
    conditions: dict[str, Any]
    facts: dict[str, Any]
    window_s: tuple[float, float]
    samples: tuple[Sample, ...]
    cores: int = 0
    cpu: tuple[CpuShare, ...] = ()
    slo: dict[str, float] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """One JSON file, written at once."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"format": FORMAT, **asdict(self)}), encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Run:
        """Raises ValueError where the file is no run of this format, naming what is wrong."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # no UTF-8, or no JSON
            raise ValueError(f"{path} is not a run of this tool: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f"{path} has no format {FORMAT!r}: it is not a run of this tool")
        try:
            begin_s, end_s = data["window_s"]
            return cls(
                **{
                    **data,
                    "window_s": (begin_s, end_s),
                    "samples": tuple(_sample(each) for each in data["samples"]),
                    "cpu": tuple(CpuShare(**each) for each in data["cpu"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is a damaged run of this tool: {error!r}") from error


def _sample(data: dict[str, Any]) -> Sample:
    return Sample(
        **{
            **data,
            "outcome": Outcome(data["outcome"]),
            "chunks": tuple(Chunk(**chunk) for chunk in data["chunks"]),
        }
    )
