"""A process of ours writes its log lines, whatever vLLM's front end does to logging."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deployments.logs import ROOT_LEVEL_VARIABLE

pytestmark = pytest.mark.slow

SCRIPT = """
import logging
{first}
from vllm.entrypoints.serve.sagemaker.api_router import attach_router
from fastapi import FastAPI
attach_router(FastAPI(), ("generate",))
for name in ("headwater.ingress", "kvcache.agent"):
    logging.getLogger(name).info("all is well")
    logging.getLogger(name).warning("look here")
"""
LINES = [
    f"{level} ... {name}: {said}"
    for name in ("headwater.ingress", "kvcache.agent")
    for level, said in (("INFO", "all is well"), ("WARNING", "look here"))
]


def said_by(first: str) -> list[str]:
    """The lines of ours on stderr, times left out, of a process that begins with these words."""
    # What another test's process of ours has set for itself, or somebody for another container.
    unset = {ROOT_LEVEL_VARIABLE, "LOG_LEVEL"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(first=first)],
        env={name: value for name, value in os.environ.items() if name not in unset},
        capture_output=True,
        text=True,
        check=True,
    )
    ours = [line for line in ran.stderr.splitlines() if "all is well" in line or "look" in line]
    return [" ".join([line.split()[0], "...", *line.split()[3:]]) for line in ours]


def test_our_lines_are_written_from_info_on() -> None:
    assert said_by("from deployments.logs import log_here; log_here()") == LINES


def test_lines_of_a_serve_replica_survive_vllms_logging() -> None:
    # As in a replica: Serve's logger in the place of stderr, then vLLM's dictConfig.
    serve = """import logging.config, logging.handlers, sys
from ray.serve._private.logging_utils import StreamToLogger
logger = logging.getLogger("ray.serve")
logger.propagate = False
logger.setLevel("INFO")
logger.addHandler(logging.handlers.MemoryHandler(1, target=logging.StreamHandler()))
sys.stderr = StreamToLogger(logger, logging.INFO, sys.stderr)
from deployments.logs import log_here
log_here()
logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})"""
    assert said_by(serve) == LINES


@pytest.mark.full
def test_where_the_root_writes_each_line_is_written_once() -> None:
    root = "logging.basicConfig(format='%(levelname)s %(asctime)s %(name)s: %(message)s')"
    assert said_by(f"{root}; from deployments.logs import log_here; log_here()") == LINES


@pytest.mark.full
def test_without_it_an_ingress_would_hide_its_warnings() -> None:
    assert said_by("") == []
