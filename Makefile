# Every target creates the environment it needs. PYTHON and VENV can be set: make test PYTHON=python3.12 VENV=/tmp/venv
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
KAFKA_PORT ?= 9092
CHAOS ?= full
CLIENT ?= kafka-python
FUZZ_SECONDS ?= 60
WORKERS ?= 4
SHELL := /bin/bash
# Without MAKEFLAGS, because Ninja reports an error if it is to share the jobs of `make --jobs`, which it cannot reach.
TOOLS := MAKEFLAGS= PATH="$(abspath $(BIN)):$$PATH"
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
CSRC := deformer_stream/kernels/csrc
KERNEL_TESTS := tests/kernels/test_library.py tests/kernels/test_abi.py tests/kernels/test_cpu.py tests/kernels/test_irregular_readings.py tests/model/test_alert_distance.py
# The tests of a file run in one process. Each process starts its own broker, so the number of processes is limited. There are
# more than cores, because tests with Kafka mostly wait.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations 15
# The tests start many programs. Without files of bytecode, each of them would compile the modules of the checkout again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help docs demo demo-page kernels test test-long test-data test-librdkafka test-ray test-kernels wheel test-wheel test-aarch64 test-lowest test-newest sbom first-hours lint check format bench bench-gpu bench-quality bench-incidents chaos chaos-incidents chaos-incidents-models test-outage fuzz kafka kafka-jars test-programs deploy-tools test-deploy clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
	  { echo "make: $(PYTHON) is not Python 3.11 to 3.14; name one with PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Install the checkout: $(call install,PACKAGE[EXTRA],options of pip). The import hook of an editable installation would come
# before the folder in which Python runs. A plain path comes after it, so that another checkout can run in this environment.
define install
$(TOOLS) $(PIP) -c constraints.txt --no-build-isolation $(2) -e '$(1)' && \
  echo '$(CURDIR)' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_editable_skbc_deformer_stream.pth"
endef

# The tools that build the package. They stay in the environment, so that building it again takes seconds and no network.
$(VENV)/.build: $(VENV)/.made constraints.txt
	$(PIP) -c constraints.txt build cmake ninja scikit-build-core setuptools-scm
	@touch $@

$(VENV)/.run: $(VENV)/.build pyproject.toml constraints.txt
	$(call install,.[train])
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(call install,.[dev])
	@touch $@

$(VENV)/.page: $(VENV)/.run
	$(call install,.[page])
	@touch $@

$(VENV)/.bench: $(VENV)/.run
	$(call install,.[bench])
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	$(call install,.[fuzz])
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(call install,.[docs])
	@touch $@

docs: $(VENV)/.docs ## build the documentation site into site/
	$(BIN)/python docs/generate_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

demo: $(VENV)/.run ## simulate a fleet, train for a minute, show early alerts and write a report (needs only Python)
	$(BIN)/deformer-stream demo --output demo-output

demo-page: $(VENV)/.page ## show incidents of simulated pumps in a browser, live, until Ctrl-C (needs only Python)
	$(BIN)/deformer-stream demo --page --output demo-output

kernels: $(VENV)/.run ## compile the C kernels of this checkout again, after their sources have changed
	@test -f $(CSRC)/build.ninja || { $(call install,.,--no-deps); }
	@$(TOOLS) cmake --build $(CSRC)

test: $(VENV)/.dev kernels kafka-jars test-programs ## run the tests, against a real Apache Kafka (WORKERS=0: in one process)
	$(PYTEST) -m "not long and not data"

test-long: $(VENV)/.dev kernels kafka-jars test-programs ## run all tests with all examples of properties, both client libraries, and long runs (an hour)
	DEFORMER_TEST_LONG=1 $(PYTEST)

test-data: $(VENV)/.dev kernels kafka-jars ## run the tests that read the public data sets (DEFORMER_DATA)
	$(PYTEST) -m data

test-librdkafka: $(VENV)/.dev kernels kafka-jars test-programs ## run the tests of Kafka that CI runs with kafka-python only with librdkafka, too
	DEFORMER_TEST_CLIENT=librdkafka $(PYTEST) -m kafka tests/connectors tests/contracts tests/integration

test-ray: $(VENV)/.dev kernels ## run replay and calibrate --engine ray (installs Ray, 300 MB, into build/venv-ray)
	$(PYTHON) -m venv --clear build/venv-ray
	build/venv-ray/bin/python -m pip install -q --disable-pip-version-check "$$(grep -oE 'ray>=[0-9.]+' pyproject.toml)"
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$(build/venv-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"
	build/venv-ray/bin/python -m pytest -q tests/runtime/ray_checks.py

test-kernels: $(VENV)/.dev kernels ## test the kernels without AVX-512, compiled by GCC and by Clang, and with sanitizers
	$(call build_kernels,gcc,-DCMAKE_C_COMPILER=gcc -DCMAKE_C_FLAGS=-Werror)
	DEFORMER_TEST_KERNELS=build/gcc/compiled $(BIN)/python -m pytest -q $(KERNEL_TESTS)
	@$(BIN)/python tests/programs.py clang
	$(call build_kernels,clang,-DCMAKE_C_COMPILER=clang -DCMAKE_C_FLAGS=-Werror)
	for set in $$($(BIN)/python -c 'from deformer_stream.kernels import library; print(*library.list_instruction_sets(False))'); do \
	  echo "instruction set $$set"; DEFORMER_INSTRUCTION_SET=$$set DEFORMER_TEST_KERNELS=build/clang/compiled \
	    $(BIN)/python -m pytest -q $(KERNEL_TESTS) || exit 1; \
	done
	$(call build_kernels,sanitized,-DCMAKE_C_COMPILER=gcc -DSANITIZE=address$(COMMA)undefined)
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  DEFORMER_TEST_KERNELS=build/sanitized/compiled $(BIN)/python -m pytest -q -p no:cacheprovider $(KERNEL_TESTS)

# Build the kernels into build/NAME/compiled: $(call build_kernels,NAME,options of CMake)
COMMA := ,
define build_kernels
$(TOOLS) cmake -G Ninja -S $(CSRC) -B build/$(1) -DOUTPUT_FOLDER=$(abspath build/$(1)/compiled) $(2)
$(TOOLS) cmake --build build/$(1)
endef

wheel: $(VENV)/.build ## build the wheel and the source distribution into dist/
	rm -rf dist
	$(TOOLS) DEFORMER_REQUIRE_KERNELS=1 $(BIN)/python -m build --no-isolation

test-wheel: $(VENV)/.dev wheel kafka-jars ## install the wheel outside the checkout, without a compiler, and train, replay and consume
	$(BIN)/python -m tests.packaging.try_wheel dist/*.whl $(if $(FRESH),--fresh)

test-aarch64: $(VENV)/.dev ## compile the kernels for aarch64 and compare a replay under qemu with one here (x86-64 with Debian 12)
	$(TOOLS) $(BIN)/python -m tests.packaging.try_aarch64

test-lowest: $(VENV)/.build kernels ## run the fast tests with the lowest allowed versions of the dependencies
	$(call test_dependencies,lowest,-c constraints-lowest.txt)

test-newest: $(VENV)/.build kernels ## run the fast tests with the newest allowed versions of the dependencies
	$(call test_dependencies,newest,--upgrade)

# Install the dependencies into build/venv-NAME, and test the checkout: $(call test_dependencies,NAME,options of pip)
define test_dependencies
$(PYTHON) -m venv --clear build/venv-$(1)
$(TOOLS) DEFORMER_PURE_WHEEL=1 $(BIN)/python -m build --no-isolation --wheel --outdir build/wheel-$(1)
build/venv-$(1)/bin/python -m pip install -q --disable-pip-version-check $(2) \
  "$$(ls build/wheel-$(1)/*.whl | tail -1)[dev]"
build/venv-$(1)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not kafka and not slow and not long and not data and not browser"
endef

sbom: $(VENV)/.build wheel ## write dist/sbom.cdx.json, the list of the installed dependencies in CycloneDX
	$(PYTHON) -m venv --clear build/venv-sbom
	build/venv-sbom/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt dist/*.whl
	$(PIP) -c constraints.txt cyclonedx-bom
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --output-file dist/sbom.cdx.json build/venv-sbom/bin/python

first-hours: $(VENV)/.dev ## run the trials of a new user with unknown tables, those that take minutes too
	$(PYTEST) tests/first_hours
	$(BIN)/python -m pytest tests/first_hours/long_trials.py

lint: $(VENV)/.dev ## check format, lint rules, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typed_program.py
	$(BIN)/lint-imports

check: lint kernels ## run lint and the fast tests
	$(PYTEST) -q -m "not kafka and not slow and not long and not data and not browser"

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev kafka-jars ## measure speed as ratios within one run, and the pipeline with Kafka; tables go to benchmarks/results
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m benchmarks.stream
	$(BIN)/python -m benchmarks.training

bench-gpu: $(VENV)/.dev kernels kafka-jars ## on a machine with a GPU: run its tests, and measure scoring, training and the pipeline with Kafka
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m benchmarks.speed --gpu
	$(BIN)/python -m benchmarks.training --device cuda --presets small,base,paper
	for device in cuda cpu; do $(BIN)/python -m benchmarks.stream throughput --client librdkafka --preset small --features 40 \
	  --gaussians 4 --payloads arrow --set device=$$device --results build/stream-$$device || exit 1; done

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

bench-incidents: $(VENV)/.bench $(VENV)/.dev kafka-jars ## measure incidents: detection on public data (DEFORMER_DATA), the budget, feedback, speed, and a receiver that hangs
	$(BIN)/python -m benchmarks.incidents skab --max-time 200s
	$(BIN)/python -m benchmarks.incidents tep --max-time 300s
	$(BIN)/python -m benchmarks.incidents hydraulic --max-time 120s
	$(BIN)/python -m benchmarks.incident_guarantee
	$(BIN)/python -m benchmarks.incident_feedback --seeds 4
	$(BIN)/python -m benchmarks.incident_speed
	$(BIN)/python -m benchmarks.incident_delivery --store

test-outage: $(VENV)/.dev kafka-jars ## stop the brokers of a consumer for 90 seconds; fail if a health check of it fails
	DEFORMER_OUTAGE_SECONDS=90 $(BIN)/python -m pytest tests/integration/test_probes.py -k outage

fuzz: $(VENV)/.fuzz ## fuzz the decoders for FUZZ_SECONDS per target (Linux), then send a million hostile messages
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.million --messages 1000000

chaos: $(VENV)/.dev kafka-jars ## kill, move and cut off consumers; fail if anything is lost or doubled (CHAOS=small: two minutes, CHAOS=tiny: one minute; CLIENT=librdkafka: the other client)
	$(BIN)/python -m tests.chaos --size $(CHAOS) --client $(CLIENT)

chaos-incidents: $(VENV)/.dev kafka-jars ## kill the process that makes incidents twenty times; fail if any incident differs
	DEFORMER_TEST_CLIENT=$(CLIENT) $(BIN)/python -m tests.chaos.incidents --kills 20

chaos-incidents-models: $(VENV)/.dev kafka-jars ## the same for one process with three models (incidents --models)
	DEFORMER_TEST_CLIENT=$(CLIENT) $(BIN)/python -m tests.chaos.incidents --kills 20 --models 3

kafka-jars: $(VENV)/.made ## fetch Apache Kafka and a schema registry with Maven (once)
	@if [ -z "$$DEFORMER_TEST_BOOTSTRAP" ]; then $(BIN)/python tests/kafka/broker.py ensure; fi
	@$(BIN)/python tests/apicurio.py

test-programs: $(VENV)/.made ## install the browser, Alertmanager and Mosquitto that tests start (once)
	@$(BIN)/python tests/programs.py

kafka: $(VENV)/.made ## run a broker on localhost:$(KAFKA_PORT) until Ctrl-C
	$(BIN)/python tests/kafka/broker.py run --port $(KAFKA_PORT)

deploy-tools: $(VENV)/.dev ## build helm and kubeconform with Go, and fetch promtool, hadolint and schemas (once)
	@$(BIN)/python -m tests.deploy.tools

test-deploy: $(VENV)/.dev deploy-tools ## check the image's file, the Helm chart with three value files, and the alert rules
	$(BIN)/python -m pytest tests/test_deploy.py tests/deploy/chart_checks.py

clean: ## remove everything that the targets have made
	rm -rf $(VENV) build dist .kafka .fuzz .cache site demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf deformer_stream/kernels/compiled $(addprefix $(CSRC)/,CMakeFiles CMakeCache.txt build.ninja .ninja_deps .ninja_log)
