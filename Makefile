# Everything that one does with a checkout. `make` alone lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
ENGINE ?=
ARGS ?=
# Tests wait more than they compute, so that more processes than processors are of use.
PROCESSES ?= $(shell python3 -c 'import os; print(2 * (os.cpu_count() or 1) + 1)')
UPGRADE ?=
# Tests start some hundred processes, each of which would compile all sources again where nothing may be kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help run demo test test-engine compiled lint format lock bench clean runtime-venv dev-venv

help: ## This list
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf 'make %-12s %s\n' "$$name" "$$text"; done

runtime-venv:
	@scripts/venv.sh $(VENV) requirements.txt

dev-venv:
	@scripts/venv.sh $(VENV) requirements-dev.txt

run: runtime-venv ## Start Hearth with what this machine offers; needs Python 3.11 or newer and nothing else (ARGS="...")
	@$(BIN)/python -m demo.start $(ARGS)

demo: runtime-venv ## Watch a burst of requests survive a node that dies (ENGINE=real: on real llama.cpp servers)
	@$(BIN)/python -m demo.burst $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

test: ## Lint, types and all tests but those that need a real engine
	@$(MAKE) --no-print-directory -j2 lint compiled
	$(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal $(ARGS)

# Done once, and beside mypy, which uses one processor, instead of by each of the tests' processes at the same time.
# What cannot be collected is told by the tests themselves.
compiled: dev-venv
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true

test-engine: dev-venv ## The tests on real llama.cpp servers; the first run installs one (needs g++ and cmake)
	INSTALL_ONLY=1 scripts/real-engine.sh .engine
	$(BIN)/python -m pytest -m engine tests/engine $(ARGS)

lint: dev-venv ## Ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: dev-venv ## Let ruff repair and format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: ## Compile requirements*.in into versions with hashes (UPGRADE=1: the newest that fit)
	@test -x build/uv/bin/uv || { python3 -m venv build/uv && build/uv/bin/pip install --quiet 'uv>=0.13'; }
	for name in requirements requirements-dev; do \
	  build/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade) $$name.in -o $$name.txt; \
	done

bench: runtime-venv ## Measure what Hearth adds to a request, beside nginx and LiteLLM if they are installed
	@$(BIN)/python -m benchmarks.overhead $(ARGS)

clean: ## Remove what was built or installed here; keeps .env and data/
	rm -rf $(VENV) build .engine .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
