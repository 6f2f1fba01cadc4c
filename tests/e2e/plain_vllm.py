"""A plain vLLM server, as its project ships it, beside which Headwater's answers are held."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from loadtests.sides import PLAIN_ENVIRONMENT, free_port
from tests.e2e.corpus import BLOCK, CASES, CONTEXT, Case
from tests.waiting import wait_until

MODEL = "SmolLM2-135M-Instruct"


@contextmanager
def plain_vllm(
    model_path: Path,
    *,
    dtype: str,
    core: int | None = None,
    more_environment: Mapping[str, str] | None = None,
) -> Iterator[httpx.Client]:
    """Start `vllm.entrypoints.openai.api_server` on a free port, one compute thread.

    core: the one core that the server and its engine run on; None for all.
    """
    port = free_port()
    environment = {**os.environ, **PLAIN_ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    environment |= more_environment or {}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model_path), "--served-model-name", MODEL, "--dtype", dtype),
        *("--max-model-len", str(CONTEXT), "--block-size", str(BLOCK)),
        # Never in chunks: a seeded prompt in chunks ends a plain vLLM 0.32 on CPU ("CPU Generator
        # does not use offset"). Headwater computes the same prompts in chunks.
        *("--max-num-batched-tokens", str(CONTEXT), "--max-num-seqs", "16"),
        *("--kv-cache-memory-bytes", str(192 << 20), "--enforce-eager", "--max-logprobs", "20"),
        *("--structured-outputs-config", '{"backend": "xgrammar"}'),
        # As Headwater's front end is configured (deployments/engine/front_end.py).
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        "--enable-prompt-tokens-details",
        "--disable-log-stats",
    ]
    if core is not None:
        command = ["taskset", "--cpu-list", str(core), *command]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=180) as http:
            wait_until(lambda: _healthy(process, http), timeout_s=180, what="plain vLLM")
            yield http
    finally:
        process.terminate()
        process.wait(timeout=60)


def _healthy(process: subprocess.Popen[bytes], http: httpx.Client) -> bool:
    assert process.poll() is None, f"plain vLLM ended with {process.returncode}"
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def corpus_answers(
    http: httpx.Client, cases: Sequence[Case] = CASES, at_once: int = 1
) -> dict[str, Any]:
    """A running server's answers by name, up to `at_once` in flight."""
    with ThreadPoolExecutor(at_once) as senders:
        answers = senders.map(lambda case: answer(http, case.path, case.body), cases)
        return {case.name: body for case, body in zip(cases, answers, strict=True)}


def answer(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Status and JSON body of one request."""
    reply = http.post(path, json={"model": MODEL, **body})
    return {"status": reply.status_code, "body": reply.json()}
