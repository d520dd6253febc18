# Everything starts with one of two commands: `make up` serves, `make test` checks.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin

.PHONY: venv up test test-slow lint proto docs logs chaos clean

venv: .venv/.stamp

.venv/.stamp: pyproject.toml constraints.txt
	@echo "setting up .venv: 1.7 GB with torch, a few minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Options of `blitzd up` go into ARGS: make up ARGS="--port 8000 --decode 2"
up: venv
	$(BIN)/blitzd up $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/blitzd model pull smollm2-135m
	$(BIN)/python -m pytest -m 'not slow and not gpu'

# What takes minutes: hundreds of kills, the long goldens, compilation for GPUs.
test-slow: venv
	$(BIN)/python -m pytest -m 'slow and not gpu' --timeout 1800

# Seeded faults on the driver in virtual time: `make chaos SEEDS=1000`.
SEEDS ?= 200
chaos: venv
	$(BIN)/python -m tests.chaos --seeds $(SEEDS)

proto: venv
	$(BIN)/python scripts/generate_proto.py

# The pages that follow from the code: states.md, events.md, config.md.
docs: venv
	$(BIN)/python scripts/generate_docs.py

# The test corpus of this version of the decisions, after they changed.
logs: venv
	$(BIN)/python scripts/record_log.py

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
