"""All gloo groups that are made with one_gloo_device share one polling thread, and work."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.contract

SCRIPT = """
import time
from pathlib import Path
import torch
import torch.distributed as dist
from deployments.engine.gloo_device import one_gloo_device

def polling():
    return sum((task / "comm").read_text() == "gloo_tcp_loop\\n"
               for task in Path("/proc/self/task").iterdir())

def make():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return [dist.new_group([0], backend="gloo") for _ in range(3)]

with one_gloo_device():
    groups = make()
for group in groups:
    given = torch.ones(2)
    dist.all_reduce(given, group=group)
    assert given.tolist() == [1, 1]
print(polling())
for group in groups:
    dist.destroy_process_group(group)
dist.destroy_process_group()
make()
deadline_s = time.monotonic() + 30  # a thread takes its name when it first runs
while polling() <= 3 and time.monotonic() < deadline_s:
    time.sleep(0.01)
print(polling())
"""


def test_gloo_groups_share_one_polling_thread() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    shared, separate = map(int, ran.stdout.split())
    assert shared == 1
    assert separate > 3, "gloo has no thread for each group any more: the patch can go"
