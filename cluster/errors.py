"""Errors of the cluster package: what a person at the command line did or found.

Raised everywhere in cluster/, caught once, in cluster/cli.py, which prints the message and ends
with `exit_code`. A message says what is wrong and what to do; it needs no traceback.
"""

from __future__ import annotations

from typing import ClassVar


class ClusterError(Exception):
    """Root of this package's errors."""

    exit_code: ClassVar[int] = 1


class ConfigError(ClusterError):
    """The configuration cannot be used: unknown key, value out of bounds, unreadable file."""

    exit_code = 2


class ModelError(ClusterError):
    """No usable model could be prepared."""


class ModelNotFoundError(ModelError):
    """There is no such folder, bundled model or hub model, or the hub cannot be reached."""


class ModelDamagedError(ModelError):
    """A model folder is there, but incomplete or not one that vLLM can load."""


class PrerequisiteError(ClusterError):
    """A program or package that the command needs is missing on this machine."""


class NotRunningError(ClusterError):
    """The command needs a running Headwater, and there is none."""


class StartError(ClusterError):
    """The application was deployed but did not come up."""


class AnswerError(ClusterError):
    """The endpoint refused a request, failed in its answer or cannot be reached; one line."""


class KeysError(ClusterError):
    """The file of API keys cannot be used or changed, or not as it was asked."""


class KillRefusedError(ClusterError):
    """A process is not ended, because it is not ours or not there."""


class GrafanaError(ClusterError):
    """A Grafana cannot be reached, refuses, or a dashboard's file cannot be used."""

    exit_code = 2  # 1 is `diff`'s word for a difference
