"""Every error that kvcache raises for the world's faults, as one tree.

Called by whoever uses the block store, the agent or the directory. Our own bugs are assertions and
never appear here. Nothing here knows HTTP: the ingress alone maps errors to answers.
"""

from __future__ import annotations


class KvCacheError(Exception):
    """Root of the tree: catch this to treat any fault of the cache as a miss."""


class StoreUnavailable(KvCacheError):
    """The agent is gone, too slow, or the operation's time-out ran out: treat it as a miss."""


class PeerNotTrusted(StoreUnavailable):
    """The other node does not know the cluster's secret: nothing is sent to it or taken from it."""


class PullTimedOut(StoreUnavailable):
    """A pull's deadline came first. Its staging is quarantined until nothing writes to it."""


class PullCancelled(StoreUnavailable):
    """The pull was cancelled by its own side."""


class RegistrationRefused(KvCacheError):
    """The agent will not have this worker: its blocks would not be the arena's blocks.

    `differences` names each field with both values, e.g. "block_size: 32 here, 64 there", where
    "here" is the worker that asked and "there" is the arena.
    """

    def __init__(self, reason: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(f"{reason}: {'; '.join(differences)}" if differences else reason)
        self.reason = reason
        self.differences = differences


class BlockUnusable(KvCacheError):
    """A block cannot be used as it was promised: recompute it."""


class StaleBlock(BlockUnusable):
    """The slot no longer holds this generation of this block (or never will again)."""


class CorruptBlock(BlockUnusable):
    """The bytes do not have the checksum that they were published with."""


class ProtocolError(KvCacheError):
    """The other end sent a frame that is too large, malformed, or out of turn."""


class AgentAlreadyRunning(KvCacheError):
    """Another live agent owns this socket path."""


class AgentStartFailed(KvCacheError):
    """The agent cannot use this socket path (too long, not a directory, wrong owner)."""


class UnknownModel(KvCacheError):
    """No worker has registered this model with the agent, so it has no arena."""
