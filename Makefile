# From a bare clone: `make demo` shows it at work, `make test` checks all of it. Both set everything up first.
.DEFAULT_GOAL := help
.PHONY: help setup demo test tests bench sim faults check fix unit

PYTHON := .venv/bin/python
CODE := kvlease devtools scripts examples bench tests
TYPED := kvlease devtools scripts examples bench
FAST := -m "not engines and not peer"
# In the order of their cost: what breaks first should be what is cheap.
TESTS := $(filter-out tests/peer tests/engines tests/__pycache__,$(patsubst %/,%,$(sort $(wildcard tests/*/)))) \
	$(wildcard tests/test_*.py) tests/peer tests/engines

help:  ## what the targets do
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with vLLM (CPU build), NIXL, the model and this project; nothing to do when it is there
	@scripts/setup.sh

demo: setup  ## a producer, a consumer and a proxy: handoffs, a killed producer, one table
	@$(PYTHON) -m scripts.demo

test: setup check  ## lint, types, unit, peer and engine tests (about half an hour on two cores)
	$(PYTHON) -m pytest $(TESTS) --cov --cov-report=term

tests: test

sim: setup  ## simulated fleets: the smallest one exhaustively, planted faults, then 20,000 seeds (ten minutes and more)
	$(PYTHON) -m tests.sim.exhaustive_table
	$(PYTHON) -m tests.sim.exhaustive
	$(PYTHON) -m tests.sim

faults: setup  ## engines killed, frozen, starved and lied to, one table (CONNECTOR=NixlConnector, ROW="swapped ...")
	@$(PYTHON) -m tests.faults $(ROW) $(if $(CONNECTOR),--connector $(CONNECTOR)) $(if $(JSON),--json $(JSON))

bench: setup  ## against vLLM's own connector, NIXL and memcpy: tables, docs/benchmarks.md and its plots
	$(PYTHON) -m bench

check: setup  ## lint and types
	$(PYTHON) -m ruff check $(CODE)
	$(PYTHON) -m ruff format --check $(CODE)
	$(PYTHON) -m mypy $(TYPED)

fix: setup  ## what lint can repair by itself
	$(PYTHON) -m ruff check --fix $(CODE)
	$(PYTHON) -m ruff format $(CODE)

unit: setup  ## the fast tests only
	$(PYTHON) -m pytest $(FAST)
