# Every target does its own set-up. Nothing here needs root or changes the system:
# Python packages go to .venv/, the database servers are unpacked into .cache/.

BIN := .venv/bin
REQUIREMENTS := .venv/.requirements-installed
PACKAGE := .venv/.package-installed

# Tests start some hundred Python processes: none should have to compile what another one has compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup servers test lint slow chaos soak demo bench load clean

help: ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-8s %s\n", $$1, $$2}'

setup: servers ## everything the other targets need; the second time it takes a second

servers: $(PACKAGE)
	@$(BIN)/python -m lockrouter.testing.binaries

$(REQUIREMENTS): requirements.txt .ci/venv
	@.ci/venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(PACKAGE): pyproject.toml $(REQUIREMENTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

lint: $(PACKAGE) ## style, types, and which module may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(PACKAGE) ## lint, then every quick test, on both servers
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint servers
	$(BIN)/pytest -m "not slow"

slow: setup ## the tests that take long and have quicker ones beside them: kills, long histories, many repetitions
	$(BIN)/pytest -m slow

chaos: setup ## random faults over four shards of both vendors, then the invariants: OPTIONS="--seconds 180 --seed 1 --on-outage local"
	$(BIN)/python -m tests.chaos $(OPTIONS)

soak: setup ## every verb at full speed: memory, threads, descriptors, sessions stay flat: OPTIONS="--operations 20000000"
	$(BIN)/python -m tests.chaos.soak $(OPTIONS)

demo: setup ## four shards, a mixed load, one outage, a proof of exclusion
	@$(BIN)/lockrouter demo

bench: setup ## locks per second beside other ways to lock, on one server of each vendor
	$(BIN)/python loadtest/bench.py

load: setup ## a Locust run without a browser on a throw-away cluster
	$(BIN)/python loadtest/run_load.py

clean: ## remove what was built; the unpacked servers in .cache/ stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find router tests loadtest -name __pycache__ -type d -prune -exec rm -rf {} +
