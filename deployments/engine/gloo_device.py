"""Lets all of torch's gloo groups of a process share one device, and with it one polling thread.

Each group makes a device of its own otherwise, whose thread wakes up 100 times a second: vLLM's 13
groups cost an idle engine 1.9 % of a core. Called by ResumeWorker, round vLLM's init_device.
Source: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp (2.13), gloo/transport/tcp/loop.cc.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from torch.distributed import distributed_c10d

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"  # gloo reads it where it makes devices itself


@contextmanager
def one_gloo_device() -> Iterator[None]:
    """Groups that the block makes share a device; they keep it after the block."""
    theirs: Any = distributed_c10d.ProcessGroupGloo
    interface = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]
    device = (
        theirs.create_device(interface=interface) if interface else theirs.create_default_device()
    )

    class SharingGroup(theirs):  # torch looks for instances of the name
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = theirs._Options()  # noqa: SLF001
            options._devices = [device]  # noqa: SLF001
            options._timeout = timeout  # noqa: SLF001
            super().__init__(store, rank, size, options)

    with patch.object(distributed_c10d, "ProcessGroupGloo", SharingGroup):
        yield
