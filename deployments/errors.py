"""Errors of the deployments package; the ingress alone maps them to HTTP."""

from __future__ import annotations


class DeploymentError(Exception):
    """Root of this package's errors."""


class LinkError(DeploymentError):
    """The connection between an ingress and a worker ended or never came up."""


class LinkRefused(LinkError):
    """The peer was reached but must not be used: wrong secret or another namespace.

    Trying again with the same two processes gives the same answer.
    """
