"""Errors of the load tool: what a person at the command line asked for, or found.

Raised by the commands and what they call, caught once, in loadtests/load/cli.py, which prints the
message. A message says what is wrong and what to do.
"""

from __future__ import annotations


class LoadError(Exception):
    """Root of the load tool's errors."""


class UsageError(LoadError):
    """Flags that do not go together, or a value that cannot be used."""


class NoServer(LoadError):
    """Nothing answers at the URL as an OpenAI-compatible server does."""
