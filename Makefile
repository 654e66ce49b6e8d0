# What people run; `make help` lists it. On the command line: PYTHON (to make .venv), VENV, TORCH (version to install),
# JOBS (test processes, but for the cluster tests).
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= 2.13.0
JOBS   ?= 2
SHELL  := /bin/bash
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-torch-$(TORCH)
SOURCE := services shared cache loadgen
FAST   := tests/test_architecture.py tests/test_packaging.py tests/unit
# They start whole clusters and bound their times: one after the other, with the machine to themselves.
ALONE  := tests/cluster
# One thread per process, no look at the model hub, modules are compiled once: tests start many processes.
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest
export PYTHONSAFEPATH = 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-compose gpu-check check lint mypy fast format types clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with everything in it (skipped when up to date)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11: give another one, as in make setup PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing torch $(TORCH) and the rest into $(VENV): minutes, and on Linux gigabytes (README, \"Which torch\")"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch==$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@rm -f $(VENV)/.setup-torch-* && touch $@

demo: setup  ## start a cluster, ask it about pictures, show each request's path
	@$(BIN)/python -m triptych.loadgen.demo

test: setup  ## all tests but the long, compose and gpu ones
	$(PYTEST) --numprocesses $(JOBS) --dist worksteal $(ALONE:%=--ignore=%)
	$(PYTEST) $(ALONE)

test-long: setup  ## the tests that take minutes, and many examples of each property
	$(PYTEST) -m 'long or hypothesis' --hypothesis-profile long --timeout 1800

test-compose: setup  ## build the images, run docker-compose.yml, send it requests (needs a Docker engine)
	$(PYTEST) tests/compose -m compose --timeout 1800

gpu-check: setup  ## the tests that need a CUDA device
	$(PYTEST) tests/gpu -m gpu

check: setup types  ## format, lint, types, fast tests
	$(MAKE) --jobs 2 lint mypy fast

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

mypy: setup types
	$(BIN)/mypy $(SOURCE:%=build/types/triptych/%) deploy/demo

fast: setup
	$(PYTEST) --numprocesses $(JOBS) $(FAST)

format: setup  ## rewrite the files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types:  ## link the folders as one package, for type checkers
	@mkdir -p build/types/triptych
	@for folder in $(SOURCE); do ln -sfn ../../../$$folder build/types/triptych/$$folder; done

clean:  ## remove what was made, .venv too
	rm -rf $(VENV) build dist *.egg-info .run .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(SOURCE) tests deploy -name __pycache__ -type d -prune -exec rm -rf {} +
