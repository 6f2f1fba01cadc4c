from __future__ import annotations

import subprocess
import sys

import pytest

from deployments.engine import environment


def test_values_that_the_code_depends_upon_replace_an_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "is_cpu_build", lambda: True)
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    environment.prepare_environment(environ)
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"
    assert environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_an_operators_choice_beats_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_cpu_build", lambda: True)
    environ = {"OMP_NUM_THREADS": "4", "VLLM_LOGGING_LEVEL": "DEBUG"}
    environment.prepare_environment(environ)
    assert environ["OMP_NUM_THREADS"] == "4"
    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_a_gpu_build_keeps_its_compiler_and_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_cpu_build", lambda: False)
    environ: dict[str, str] = {}
    environment.prepare_environment(environ)
    assert "TORCHDYNAMO_DISABLE" not in environ
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environ


def test_importing_the_package_sets_the_environment_and_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import os, sys, deployments.engine, deployments.engine.settings\n"
        "assert os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] == '0'\n"
        "assert not {'torch', 'vllm', 'ray'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
