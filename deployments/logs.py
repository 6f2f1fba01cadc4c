"""What a process of ours writes into its log: the lines of our own loggers, on stderr.

Ray keeps stderr as the process's worker-….err file, and shows it in its dashboard. Called first by
every replica and actor. Without it there would be no INFO line at all, and in an ingress no
warning either: a package that vLLM's front end imports (model_hosting_container_standards) sets
the root logger to ERROR.
"""

from __future__ import annotations

import logging
import os
import sys

from deployments.fork_client import PROBLEM_VARIABLE

log = logging.getLogger("headwater")

OURS = ("headwater", "kvcache", "router", "deployments")
ROOT_LEVEL_VARIABLE = "SAGEMAKER_CONTAINER_LOG_LEVEL"  # of that package
FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


def log_here() -> None:
    """From INFO on. Where the root has handlers (Ray's logging_config, tests), those write."""
    os.environ.setdefault(ROOT_LEVEL_VARIABLE, "WARNING")
    is_taken_care_of = bool(logging.getLogger().handlers)
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        if not is_taken_care_of and not logger.handlers:
            # Not sys.stderr: in a replica Serve puts its own logger there, whose handler loses its
            # file as soon as vLLM configures logging (dictConfig closes every existing handler).
            handler = logging.StreamHandler(sys.__stderr__)
            handler.setFormatter(logging.Formatter(FORMAT))
            logger.addHandler(handler)
    problem = os.environ.pop(PROBLEM_VARIABLE, "")
    if problem:
        log.warning("started without the fork server, which takes longer (%s)", problem)
