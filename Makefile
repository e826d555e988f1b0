# Every target creates the environment it needs. PYTHON and VENV can be set: make test PYTHON=python3.12 VENV=/tmp/venv
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
KAFKA_PORT ?= 9092
CHAOS ?= full
FUZZ_SECONDS ?= 60
WORKERS ?= 3
SHELL := /bin/bash
# The tests of a file run in one process. Each process starts its own broker, so the number of processes is limited.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help docs demo demo-page kernels test first-hours lint check format bench bench-quality chaos chaos-incidents fuzz kafka kafka-jars test-programs clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

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

$(VENV)/.page: $(VENV)/.run
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[page]'
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

docs: $(VENV)/.docs ## build the documentation site into site/
	$(BIN)/python docs/generate_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

demo: $(VENV)/.run ## simulate a fleet, train for a minute, show early alerts and write a report (needs only Python)
	$(BIN)/deformer-stream demo --output demo-output

demo-page: $(VENV)/.page ## show incidents of simulated pumps in a browser, live, until Ctrl-C (needs only Python)
	$(BIN)/deformer-stream demo --page --output demo-output

kernels: $(VENV)/.dev ## compile the C kernels of this checkout again, after their sources have changed
	@PATH="$(abspath $(BIN)):$$PATH" && cmake -G Ninja -S deformer_stream/kernels/csrc -B build/kernels \
	  -DIN_SOURCE_TREE=ON > build/kernels.log 2>&1 && cmake --build build/kernels || { cat build/kernels.log; exit 1; }

test: $(VENV)/.dev kernels kafka-jars test-programs ## run all tests, against a real Apache Kafka (WORKERS=0: in one process)
	$(PYTEST)

first-hours: $(VENV)/.dev ## run the trials of a new user with unknown tables, those that take minutes too
	$(PYTEST) tests/first_hours
	$(BIN)/python -m pytest tests/first_hours/long_trials.py

lint: $(VENV)/.dev ## check format, lint rules, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint kernels ## run lint and the fast tests
	$(PYTEST) -q -m "not kafka and not slow and not data and not browser"

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev kafka-jars ## measure speed as ratios within one run, and the pipeline with Kafka; tables go to benchmarks/results
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m benchmarks.stream
	$(BIN)/python -m benchmarks.training

bench-quality: $(VENV)/.bench ## measure detection, early alerts, drift, density, attribution and imputation against other methods on public data (DEFORMER_DATA)
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.density
	$(BIN)/python -m benchmarks.early
	$(BIN)/python -m benchmarks.ties --tables cardio,pendigits,satellite,shuttle,thyroid
	$(BIN)/python -m benchmarks.drift
	$(BIN)/python -m benchmarks.contamination
	$(BIN)/python -m benchmarks.skab
	$(BIN)/python -m benchmarks.attribution
	$(BIN)/python -m benchmarks.imputation
	$(BIN)/python -m benchmarks.icu --deformer
	$(BIN)/python -m benchmarks.irregular_attribution
	$(BIN)/python -m benchmarks.icu_imputation --deformer
	$(BIN)/python -m benchmarks.hydraulic --deformer
	$(BIN)/python -m benchmarks.fleet --deformer

fuzz: $(VENV)/.fuzz ## fuzz the decoders for FUZZ_SECONDS per target (Linux), then send a million hostile messages
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.million --messages 1000000

chaos: $(VENV)/.dev kafka-jars ## kill, move and cut off consumers; fail if anything is lost or doubled (CHAOS=small: two minutes)
	$(BIN)/python -m tests.chaos --size $(CHAOS)

chaos-incidents: $(VENV)/.dev kafka-jars ## kill the process that makes incidents twenty times; fail if any incident differs
	$(BIN)/python -m tests.chaos.incidents --kills 20

kafka-jars: $(VENV)/.made ## fetch Apache Kafka with Maven (once)
	@if [ -z "$$DEFORMER_TEST_BOOTSTRAP" ]; then $(BIN)/python tests/kafka/broker.py ensure; fi

test-programs: $(VENV)/.made ## install the browser and Alertmanager that tests start (once)
	@$(BIN)/python tests/programs.py

kafka: $(VENV)/.made ## run a broker on localhost:$(KAFKA_PORT) until Ctrl-C
	$(BIN)/python tests/kafka/broker.py run --port $(KAFKA_PORT)

clean: ## remove everything that the targets have made
	rm -rf $(VENV) build dist deformer_stream/kernels/compiled .kafka .fuzz .cache site demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
