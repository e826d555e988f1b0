# Every target makes the environment it needs. PYTHON and VENV can be set: make test PYTHON=python3.12 VENV=/tmp/venv
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
KAFKA_PORT ?= 9092
CHAOS ?= full
FUZZ_SECONDS ?= 60
WORKERS ?= auto
SHELL := /bin/bash
# A file's tests stay in one process; each process has a broker of its own, so that there are not many of them.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help docs demo test lint check format bench bench-quality chaos fuzz kafka kafka-jars clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "make: $(PYTHON) is not Python 3.11 to 3.13; name one with PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.run
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs ## the documentation site, in site/
	$(BIN)/python docs/generate_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

demo: $(VENV)/.run ## a simulated fleet, a minute of training, early alerts, a report (Python only)
	$(BIN)/deformer-stream demo --output demo-output

test: $(VENV)/.dev kafka-jars ## all tests, against a real Apache Kafka (WORKERS=0: in one process)
	$(PYTEST)

lint: $(VENV)/.dev ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint ## lint, and the fast tests
	$(PYTEST) -q -m "not kafka and not slow and not data"

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev kafka-jars ## speed, as ratios measured in one run, and the whole road; tables into benchmarks/results
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m benchmarks.stream
	$(BIN)/python -m benchmarks.training

bench-quality: $(VENV)/.bench ## detection, early alerts, drift, density, blame and imputation on public data beside their peers (DEFORMER_DATA); tables into benchmarks/results
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.density
	$(BIN)/python -m benchmarks.early
	$(BIN)/python -m benchmarks.ties --tables cardio,pendigits,satellite,shuttle,thyroid
	$(BIN)/python -m benchmarks.drift
	$(BIN)/python -m benchmarks.contamination
	$(BIN)/python -m benchmarks.skab
	$(BIN)/python -m benchmarks.attribution
	$(BIN)/python -m benchmarks.imputation

fuzz: $(VENV)/.fuzz ## coverage-guided fuzzing, FUZZ_SECONDS for each target (Linux); then a million hostile messages
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.million --messages 1000000

chaos: $(VENV)/.dev kafka-jars ## consumers killed, moved, cut off: nothing lost, nothing doubled (CHAOS=small: two minutes)
	$(BIN)/python -m tests.chaos --size $(CHAOS)

kafka-jars: $(VENV)/.made ## fetch Apache Kafka by Maven (once)
	@if [ -z "$$DEFORMER_TEST_BOOTSTRAP" ]; then $(BIN)/python tests/kafka/broker.py ensure; fi

kafka: $(VENV)/.made ## a broker on localhost:$(KAFKA_PORT), until Ctrl-C
	$(BIN)/python tests/kafka/broker.py run --port $(KAFKA_PORT)

clean: ## remove what the targets made
	rm -rf $(VENV) .kafka .fuzz demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
