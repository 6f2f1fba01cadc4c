"""Processes for engines: forks of a process that has imported vLLM, which takes seconds each time.

Called by connector_engine.py and test_reference_answers.py.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext

from deployments.engine.environment import prepare_environment

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}  # beside the product's
IMPORTED = [
    "vllm.engine.arg_utils",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "kvcache.connector.block_connector",
]


def engine_forks() -> ForkServerContext:
    """Like the module multiprocessing. The first process waits for the imports."""
    os.environ.update(ENVIRONMENT)
    prepare_environment()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context
