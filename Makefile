# For developers. Everything runs in .venv, which `make environment` and `./headwater test` make.
VENV ?= $(if $(HEADWATER_VENV),$(HEADWATER_VENV),.venv)
PYTHON := $(VENV)/bin/python
UV ?= $(VENV)/bin/uv
SOURCES := cluster deployments helm kvcache loadtests router requirements tests

.PHONY: help check environment lint format format-check types imports unit sim test test-all test-avx2 e2e chaos test-nodes test-helm chart-docs chart-layer \
        agreement bench lock clean

# BENCH: flags of loadtests.bench, such as BENCH="--only slab".
BENCH ?=

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-13s %s\n", $$1, $$2}' Makefile

check: environment  ## everything that needs no engine; under three minutes, in a clean clone after installing
	$(MAKE) lint types imports unit

environment:  ## what checks and tests need, installed by the launcher
	HEADWATER_ONLY_INSTALL=1 HEADWATER_VENV="$(VENV)" ./headwater test

lint: format-check  ## ruff: format and all rules
	$(PYTHON) -m ruff check $(SOURCES)

format-check:
	$(PYTHON) -m ruff format --check $(SOURCES)

format:  ## let ruff format and mend what it can
	$(PYTHON) -m ruff format $(SOURCES)
	$(PYTHON) -m ruff check --fix $(SOURCES)

types:  ## mypy, strict
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy requirements/lock.py helm/generate.py helm/layer.py helm/files/question.py

imports:  ## who may import whom
	$(VENV)/bin/lint-imports

unit:  ## pure tests, milliseconds each, one process a core
	PYTHONPATH="$(CURDIR)" $(PYTHON) -m pytest tests/unit --quick -n auto --dist loadfile

SEEDS ?= 2000
sim:  ## the control plane in virtual time, SEEDS fault schedules; see tests/simulation
	$(PYTHON) -m tests.simulation --seeds $(SEEDS)

test:  ## the short suite, which CI runs
	./headwater test

test-all:  ## every test, about an hour on two cores
	./headwater test --all

test-avx2:  ## the short suite, computed as on a CPU with AVX2 and nothing newer
	PYTHONPATH="$(CURDIR)/tests/avx2" ./headwater test

e2e:  ## tests on a whole running cluster
	./headwater test -m e2e

test-nodes:  ## prefill and decode on two Ray nodes; as root, over a network of namespaces too
	./headwater test tests/e2e/nodes

test-helm:  ## the chart: lint, render and check every values file and a matrix of switches
	$(PYTHON) -m pytest tests/helm

chart-docs:  ## what is generated in helm/: values.schema.json's config, README's table of values
	$(PYTHON) -m helm.generate

LAYER_BUILD ?= cpu
chart-layer:  ## build/headwater-layer.tar.xz, which brings the code to pods of Ray's own image
	$(PYTHON) helm/layer.py --build $(LAYER_BUILD)

chaos:  ## tests that kill processes, and each fault in each stage with real engines (an hour)
	./headwater test -m "chaos or matrix"

agreement:  ## bfloat16 against a plain vLLM server: where answers part
	$(PYTHON) -m tests.e2e.agreement

bench:  ## benchmarks beside their baselines; rewrites loadtests/RESULTS.md
	$(PYTHON) -m loadtests.bench $(BENCH)

lock:  ## resolve requirements/*.in into hashed locks 
	$(PYTHON) requirements/lock.py --uv $(UV)

clean:  ## remove caches, not the environment
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
