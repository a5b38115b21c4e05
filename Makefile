# Everything a clone needs is made by `make setup`; the other targets call it. A second call costs nothing.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: help setup repro test test-slow lint format lock clean

PYTHON ?= python3# 3.11, 3.12 or 3.13
TORCH_INDEX ?=# a package index with CPU-only torch, to spare the CUDA libraries on a machine without GPU
BIN := .venv/bin
STAMP := .venv/.stamp

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP) ## virtual environment, locked packages, CPU kernels
	@$(BIN)/python -m pipeline.environment

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1); use Python 3.11 to 3.13 (make PYTHON=...)" >&2; exit 4; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python -m kernels.cpu.build
	touch $@

repro: setup ## the default experiment over all its layouts; prints `identical: <digest>`
	$(BIN)/python -m pipeline -m

test: setup ## the tests that take minutes together
	$(BIN)/python -m pytest -q

test-slow: setup ## all tests of this machine, real weights included
	$(BIN)/python -m pytest -q -m 'not gpu'

lint: setup ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup ## what ruff can repair by itself
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

lock: ## requirements.lock from requirements.in (needs uv)
	uv pip compile requirements.in --override <(echo "torch ; sys_platform == 'none'") --no-emit-package torch --universal \
	  --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header -o requirements.lock

clean: ## what runs leave behind; packages and the result cache of DVC stay
	rm -rf runs reports logs build kernels/cpu/_build .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
