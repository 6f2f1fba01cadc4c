from __future__ import annotations

import os
import subprocess
import sys

import psutil

from loadtests.compare.cpu import STRANGERS, SetUpMeter, Snapshot, engines_cpu_s, snapshot, used
from loadtests.compare.setups import Running
from loadtests.load.cpu import GENERATOR, Reading
from loadtests.load.records import CpuShare


def readings(engine_s: float, proxy_s: float) -> dict[tuple[int, float], Reading]:
    return {
        (1, 0.0): Reading("engine", engine=True, cpu_s=engine_s),
        (2, 0.0): Reading("engine", engine=True, cpu_s=2 * engine_s),
        (3, 0.0): Reading("proxy", engine=False, cpu_s=proxy_s),
    }


def test_what_the_machine_did_beyond_ours_is_the_strangers() -> None:
    found = used(Snapshot(readings(1.0, 1.0), 100.0), Snapshot(readings(3.0, 2.0), 109.5))
    assert found == (
        CpuShare("engine", 6.0, engine=True),
        CpuShare(STRANGERS, 2.5, engine=False),
        CpuShare("proxy", 1.0, engine=False),
    )
    assert engines_cpu_s(found) == 6.0


def test_clocks_that_disagree_by_a_tick_make_no_negative_share() -> None:
    found = used(Snapshot(readings(1.0, 1.0), 100.0), Snapshot(readings(2.0, 1.0), 102.9))
    assert min(share.cpu_s for share in found) == 0.0


def test_a_set_up_is_its_processes_and_theirs_and_roles_name_them() -> None:
    script = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    try:
        root = psutil.Process(process.pid)
        while not root.children():
            pass
        (child,) = root.children()
        running = Running((), "", (root,), {child.pid: ("decode worker", True)})
        found = {key[0]: reading for key, reading in snapshot(running).readings.items()}
        assert found.keys() == {process.pid, child.pid, os.getpid()}
        assert (found[child.pid].label, found[child.pid].engine) == ("decode worker", True)
        assert not found[process.pid].engine
        assert found[os.getpid()].label == GENERATOR
        child.kill()
    finally:
        process.kill()
        process.wait()


def test_a_set_up_that_has_gone_leaves_the_load_generator() -> None:
    process = subprocess.Popen(["true"])
    root = psutil.Process(process.pid)
    process.wait()
    running = Running((), "", (root,))
    assert {key[0] for key in snapshot(running).readings} == {os.getpid()}


async def test_the_meter_reads_at_both_ends() -> None:
    looks = iter([Snapshot(readings(1.0, 1.0), 10.0), Snapshot(readings(2.0, 1.0), 13.0)])
    meter = SetUpMeter(Running((), "", (psutil.Process(),)), look=lambda _: next(looks))
    await meter.begin()
    assert await meter.end() == (
        CpuShare("engine", 3.0, engine=True),
        CpuShare("proxy", 0.0, engine=False),
        CpuShare(STRANGERS, 0.0, engine=False),
    )


async def test_of_an_address_nothing_is_seen() -> None:
    meter = SetUpMeter(Running(("http://127.0.0.1:1",), "m"))
    await meter.begin()
    assert await meter.end() == ()
