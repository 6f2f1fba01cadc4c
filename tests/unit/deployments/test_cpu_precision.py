"""Which precisions a CPU computes natively, from its flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.cpu_precision import FLAGS_VARIABLE, cpu_flags, native_flag, slow_reason

X86 = "processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n\nprocessor\t: 1\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


@pytest.mark.parametrize(
    ("text", "flags"),
    [(X86, {"fpu", "avx2", "avx512_bf16"}), (ARM, {"fp", "asimd", "bf16"}), ("other: 1\n", set())],
)
def test_cpu_flags_are_those_of_the_first_cpu(tmp_path: Path, text: str, flags: set[str]) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_flags({}, tmp_path / "cpuinfo") == flags


def test_cpu_flags_can_be_given_and_may_be_missing(tmp_path: Path) -> None:
    assert cpu_flags({FLAGS_VARIABLE: "avx2 fma"}) == {"avx2", "fma"}
    assert cpu_flags({FLAGS_VARIABLE: ""}) == set()
    assert cpu_flags({}, tmp_path / "absent") == set()


@pytest.mark.parametrize(
    ("flags", "dtype", "flag"),
    [
        ({"avx2", "fma"}, "bfloat16", None),
        ({"avx512f", "avx512_bf16"}, "bfloat16", "avx512_bf16"),
        ({"amx_bf16", "avx512_bf16"}, "bfloat16", "amx_bf16"),
        ({"asimd", "bf16"}, "bfloat16", "bf16"),
        ({"avx512_bf16"}, "float16", None),
        ({"avx512_fp16"}, "float16", "avx512_fp16"),
    ],
)
def test_native_flag_and_slow_reason_agree(flags: set[str], dtype: str, flag: str | None) -> None:
    found = frozenset(flags)
    assert native_flag(found, dtype) == flag
    assert bool(slow_reason(found, dtype)) == (flag is None)
    assert slow_reason(found, "float32") == ""
