"""The router's error tree. Raised by router/; deployments' ingress maps it to HTTP."""

from __future__ import annotations


class RouterError(Exception):
    """Any error of the router that is not a bug."""


class NoWorker(RouterError):
    """No worker of `role` can take a request for `model` now (none ready, or all excluded)."""

    def __init__(self, model: str, role: str) -> None:
        super().__init__(f"no {role} worker can take a request for model {model!r}")
        self.model = model
        self.role = role


class UnknownWorker(RouterError):
    """The router was told about a worker that was never added, or is gone."""

    def __init__(self, worker: str) -> None:
        super().__init__(f"worker {worker!r} is not known to the router")
        self.worker = worker


class BlockSizeMismatch(RouterError):
    """A worker's block size differs from that of the model's other workers."""

    def __init__(self, worker: str, model: str, here: int, there: int) -> None:
        super().__init__(
            f"worker {worker!r} of model {model!r}: block_size {there}, the others have {here}"
        )
        self.worker = worker
        self.model = model
