"""What the benchmark of the chosen dtype says of given times, and how it emulates."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests import auto_dtype
from loadtests.auto_dtype import Asked, cpu_flags, environment_of, section_of
from loadtests.latency import Endpoint


def asked(ours: tuple[str, float], float32: float, bfloat16: float) -> list[Asked]:
    dtype, ms = ours
    return [
        Asked(Endpoint("Headwater", ""), dtype, [ms, ms, 10 * ms]),
        Asked(Endpoint("plain vLLM", ""), "float32", [float32] * 3),
        Asked(Endpoint("plain vLLM", ""), "bfloat16", [bfloat16] * 3),
    ]


@pytest.mark.parametrize(
    ("ours", "float32", "bfloat16", "missed"),
    [
        (("float32", 100.0), 99.0, 500.0, 0),
        (("float32", 110.0), 99.0, 500.0, 1),
        (("float32", 110.0), 99.0, 300.0, 2),
        (("bfloat16", 100.0), 400.0, 99.0, 0),
        (("bfloat16", 100.0), 20.0, 99.0, 1),
    ],
)
def test_section_judges_by_medians_and_the_best_dtype(
    ours: tuple[str, float], float32: float, bfloat16: float, missed: int
) -> None:
    section = section_of(asked(ours, float32, bfloat16), 1500, None, ["avx2"])
    assert len(section.missed) == missed
    assert any(f"chose {ours[0]}" in line for line in section.conditions)


def test_emulated_section_says_so_and_has_a_name_of_its_own() -> None:
    times = asked(("float32", 100.0), 99.0, 500.0)
    real = section_of(times, 1500, None, ["avx2", "avx512_bf16"])
    emulated = section_of(times, 1500, "avx2", ["avx2", "avx512_bf16"])
    assert real.name != emulated.name
    assert any("Emulated" in line and "avx512_bf16" in line for line in emulated.conditions)


def test_emulation_hides_the_newer_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_dtype, "EMULATOR", tmp_path)
    flags = ["fma", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx_vnni"]
    assert environment_of(None, flags) == {}
    with pytest.raises(FileNotFoundError):
        environment_of("avx2", flags)
    (tmp_path / "sitecustomize.py").touch()
    found = environment_of("avx2", flags)
    assert found["HEADWATER_CPU_FLAGS"] == "fma avx2"
    assert found["PYTHONPATH"].startswith(str(tmp_path))


def test_cpu_flags_are_read_from_cpuinfo(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu avx2\nflags : fpu\n")
    assert cpu_flags(tmp_path / "cpuinfo") == ["fpu", "avx2"]
