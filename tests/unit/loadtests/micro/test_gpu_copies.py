"""The GPU's benchmark with a CPU in its place: that it measures every way and sees a wrong byte."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import torch

from kvcache.connector.device_copies import DeviceCopies
from loadtests.micro import gpu_copies
from loadtests.micro.gpu_copies import EXIT_NO_GPU, LAYOUTS, Machine, measure, rows_of
from tests.unit.kvcache.connector.stub_streams import StubStreams

BOUNCE = 3 << 17  # three blocks of two layers


def nothing(*_: object) -> None:
    pass


def stub() -> Machine:
    """Copies on the CPU; the streams and the pinning are stubs."""
    return Machine(torch.device("cpu"), StubStreams(), nothing, nothing, nothing, nothing)


def refuses(*_: object) -> None:
    raise OSError(2, "cudaHostRegister answers 2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_way_is_measured_beside_a_plain_copy_and_nothing_is_wrong(layout: str) -> None:
    found, problem = measure(stub(), layout, 2, 8, BOUNCE, 2)
    assert (found.wrong, problem) == ([], "")
    assert [(row[0], row[3] != "") for row in rows_of(found)] == [
        ("plain, device to host", False),
        ("plain, host to device", False),
        ("gather, slab pinned", True),
        ("the same with checksums", True),
        ("gather, bounce buffer", True),
        ("load: staged, checked, scattered", True),
        ("scatter, bounce buffer", True),
    ]
    assert {len(rates) for rates in found.rates.values()} == {2}


def test_a_slab_that_cannot_be_pinned_is_named_and_the_rest_is_measured() -> None:
    machine = stub()
    cannot = Machine(machine.device, machine.streams, refuses, nothing, nothing, nothing)
    found, problem = measure(cannot, "one run a block", 2, 8, BOUNCE, 1)
    assert "answers 2" in problem
    assert "gather, slab pinned" not in found.rates and "gather, bounce buffer" in found.rates


def test_a_block_in_another_ones_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = DeviceCopies.gather

    def swapped(copies: DeviceCopies, block_ids: Sequence[int], slots: Sequence[object]) -> None:
        gather(copies, list(reversed(block_ids)), slots)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceCopies, "gather", swapped)
    found, _ = measure(stub(), "one run a block", 2, 8, BOUNCE, 1)
    assert "gather, bounce buffer: other bytes" in found.wrong


def test_a_lane_that_does_not_wait_is_seen() -> None:
    """The device's compute is as late as a step can be: its writes land at the next wait."""
    found = gpu_copies.Found()
    bench = gpu_copies.Bench(stub(), "one run a block", 2, 8, BOUNCE)
    late = torch.zeros_like(bench.planes[0].rows[0])
    bench.planes = [  # what the check fills is not what the copies read
        type(p)((late, *p.rows[1:]), p.blocks, p.row_bytes, p.layer_planes, p.block_shape)
        for p in bench.planes
    ]
    bench.order(found)
    bench.close()
    assert found.wrong == [
        "a gather did not wait for the step",
        "a load did not wait for the step before",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_copies.main([]) == EXIT_NO_GPU
    assert "finds no GPU here; nothing was measured" in capsys.readouterr().err


def test_it_needs_no_vllm() -> None:
    import subprocess

    code = "import loadtests.micro.gpu_copies, sys; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
