# Every door into the repository. `make help` lists them; all need nothing but python3 (3.11 or newer) and make.
#
# The environment is .venv, built from pyproject.toml under constraints.txt, and built again when either changes. The
# targets under "Use" need what Podium itself needs and what draws curves; all others add the development tools.
# With a GPU, or another build of torch: make env TORCH_SPEC="torch==2.13.0 --index-url …"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# Images of containers often set it, and then each interpreter compiles Podium anew: a second of processor time.
unexport PYTHONDONTWRITEBYTECODE

# The first interpreter found that is new enough; PYTHON=… names another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
WHEEL_PYTHON ?= $(PYTHON)
NEWEST_PYTHON ?= $(firstword $(shell for p in python3.14 "$$HOME"/.pyenv/versions/3.14*/bin/python \
		python3.13 "$$HOME"/.pyenv/versions/3.13*/bin/python; do \
	"$$p" -c '' >/dev/null 2>&1 && echo "$$p"; done))
TORCH_SPEC ?= torch==2.13.0
# One more than there are cores: a quarter of the time the tests wait, for limits that pass and processes that start.
TEST_PROCESSES ?= $(shell echo $$(($$(nproc 2>/dev/null || echo 2) + 1)))

BIN := .venv/bin
RUNTIME := .venv/.runtime
STAMP := .venv/.installed
# What runs `make gpu`: .venv, or the Python of a machine that has torch with CUDA, and then no .venv is made.
GPU_PYTHON ?=
GPU_WHEELS := .gpu-wheels
GPU_PYTHON_VERSION ?= 3.12
GPU_PLATFORMS ?= manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64

NEWEST_TESTS := tests/unit/training tests/unit/models tests/unit/workers tests/unit/rollout/engines tests/contract/test_engines.py \
	tests/integration/test_losses_ranks.py tests/integration/test_workers_ranks.py tests/integration/test_shards_ranks.py \
	tests/integration/test_train_grpo.py tests/integration/test_train_sft.py

PLUGINS := $(wildcard plugins/podium-*)
RUNTIME_PLUGINS := $(addprefix plugins/podium-,agents algorithms curves dryrun inference migration native preferences view)
PEERS := ray trl verl monarch areal vllm
CLIENTS := openai-agents langgraph litellm inspect

##@ Use
quickstart: $(RUNTIME)  ## train a small model to add: about two minutes on two cores; needs no compiler
	@echo "training: about two minutes on two cores: sums by fine-tuning, then GRPO"
	@$(BIN)/python examples/quickstart.py $(ARGS)

smoke: $(RUNTIME)  ## in under a minute: a smaller model learns to copy digits, from random weights
	@echo "training: under a minute on two cores: GRPO from random weights"
	@$(BIN)/python examples/quickstart.py --smoke $(ARGS)

real: $(RUNTIME)  ## train a published model of 135 million parameters by GRPO: three minutes of processor time
	@$(BIN)/python examples/real/convert.py
	@echo "training: about three minutes of processor time: twelve steps of GRPO, and held-out prompts every four"
	@$(BIN)/python examples/real/train.py $(ARGS)

##@ Develop
env: $(STAMP)  ## create or refresh the environment in .venv

# pyright is one process of two minutes: it runs beside the tests, which leave it the time of a core, and what it says
# comes after their output.
check: .lint-text  ## the one door for a change: format, lint, types, layering, quick tests
	@log=$$(mktemp); set -m; $(MAKE) .lint-types > "$$log" 2>&1 & types=$$!; set +m; \
		trap 'kill -- -$$types 2>/dev/null || true; rm -f "$$log"' EXIT; \
		status=0; nice $(MAKE) test-fast || status=$$?; wait $$types || status=$$?; cat "$$log"; exit $$status

lint: .lint-text .lint-types  ## format, lint, types and layering, without the tests

.lint-text: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/python .ci/names.py

.lint-types: $(STAMP)
	@$(BIN)/pyright --level warning
	@$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the files as the formatter and the fixable lint rules want them
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

test: $(STAMP)  ## the everyday tests, in one process more than there are cores
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope $(ARGS)

test-all: $(STAMP)  ## every test, those marked exhaustive too: before a release, and nightly
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope --all $(ARGS)
	@for client in $(CLIENTS); do if [[ -e .venvs/$$client/.installed ]]; then $(MAKE) .client-$$client; \
		else echo "skipped: the client $$client is not installed: make test-clients"; fi; done

test-ray: $(STAMP)  ## every test with Ray: ten minutes; if all pass, `make test` leaves most out until Ray's code changes
	@$(BIN)/python -m tests.ray_selection

test-seconds: $(STAMP)  ## the everyday tests; record the seconds of each file in tests/seconds.json
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope --record-seconds $(ARGS)

test-alone: $(STAMP)  ## each file of the everyday tests in a process of its own, in random order; continues where it was stopped
	@$(BIN)/python -m tests.isolation --processes $(TEST_PROCESSES) $(ARGS)

test-busy: $(STAMP)  ## the everyday tests ten times beside four processes that compute; continues where it was stopped
	@$(BIN)/python -m tests.busy --processes $(TEST_PROCESSES) $(ARGS)

recipes: $(STAMP)  ## train the recipes of agents, each run to its bar, and write their figures: an hour
	@$(BIN)/python -m bench.recipes $(ARGS)

test-fast: $(STAMP)  ## the quick tests of tests/unit and the plugins, and all of what the change touches
	@$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadscope -m "not slow" --quick tests/unit plugins $(ARGS)

docs: $(STAMP)  ## build the documentation's site into site/; ARGS=serve shows it on localhost while you write
	@$(BIN)/python -m zensical $(if $(filter serve,$(ARGS)),serve,build --strict)

fuzz: $(STAMP)  ## all of the ten thousand broken inputs, of which the tests try a third
	@$(BIN)/python -W ignore -m tests.integration.test_fuzz

test-monarch: .venvs/monarch/.installed  ## the contract suite on Monarch, in an environment of its own: four minutes
	@.venvs/monarch/bin/python -m pytest plugins/podium-monarch/tests --all $(ARGS)

test-vllm: .venvs/vllm/.installed  ## the engine vllm with vLLM's build for CPUs, in an environment of its own
	@.venvs/vllm/bin/python -m pytest $$(grep -rl --include='*.py' 'mark\.vllm' tests plugins) -m vllm $(ARGS)

test-clients: $(CLIENTS:%=.client-%)  ## agents of other libraries, each in an environment of its own: three minutes

.client-%: .venvs/%/.installed
	@.venvs/$*/bin/python -m pytest tests/integration/test_clients.py --all -k $(subst -,_,$*) $(ARGS)

test-newest:  ## tests of models, training and engines with the newest libraries that pyproject.toml allows: ten minutes
	@[[ -x .venvs/newest/bin/python ]] || $(PYTHON) -m venv .venvs/newest
	@.venvs/newest/bin/pip install -q --disable-pip-version-check $(TORCH_SPEC)
	@.venvs/newest/bin/pip freeze --disable-pip-version-check | sed -n '/^torch==/p' > .venvs/newest/constraints.txt
	@.venvs/newest/bin/pip install -q --disable-pip-version-check -c .venvs/newest/constraints.txt \
		--upgrade --upgrade-strategy eager -e '.[dev]'
	@.venvs/newest/bin/pip install -q --disable-pip-version-check --no-deps $(PLUGINS:%=-e %)
	@.venvs/newest/bin/pip freeze --disable-pip-version-check | grep -E '^(torch|transformers|peft|datasets|tokenizers)=='
	@.venvs/newest/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadscope $(NEWEST_TESTS) $(ARGS)

test-wheel: $(STAMP)  ## build the wheel and use it in a fresh environment without extras and compiler: two minutes
	@rm -rf dist
	@$(BIN)/pip wheel -q --disable-pip-version-check --no-deps -w dist . ./plugins/podium-completion ./plugins/podium-inference ./plugins/podium-migration ./plugins/podium-native ./plugins/podium-view
	@rm -rf .venvs/$@
	@$(WHEEL_PYTHON) -m venv .venvs/$@
	@.venvs/$@/bin/pip install -q --disable-pip-version-check $(TORCH_SPEC)
	@grep -v '^torch==' constraints.txt > .venvs/$@/constraints.txt
	@.venvs/$@/bin/pip install -q --disable-pip-version-check --only-binary=:all: -c .venvs/$@/constraints.txt dist/podium*.whl
	@.venvs/$@/bin/pip check --disable-pip-version-check
	@.venvs/$@/bin/python -I tests/packaging/check_wheel.py

test-wheel-newest:  ## the same on Python 3.14 or 3.13, where one is installed (torch with CUDA, several GB): five minutes
	@if [[ -z "$(NEWEST_PYTHON)" ]]; then echo "skipped: there is no Python 3.14 or 3.13 here"; \
		else $(MAKE) test-wheel WHEEL_PYTHON="$(NEWEST_PYTHON)"; fi

##@ Measure
bench: $(STAMP)  ## every figure of the README, beside floors and installed peers: 45 minutes; writes bench/results.json
	@$(BIN)/python -m bench $(ARGS)

pictures: $(STAMP)  ## draw the pictures of the README from a run of the quickstart: two minutes
	@$(BIN)/python -m bench.pictures $(ARGS)

soak: $(STAMP)  ## ten thousand steps through references, with faults among them: what grows is a leak
	@$(BIN)/python -m bench.soak $(ARGS)

chaos: $(STAMP)  ## runs that lose processes at random moments, in every schedule: what became of each prompt
	@$(BIN)/python -m bench.chaos $(ARGS)

gpu: $(if $(GPU_PYTHON),,$(STAMP))  ## prove and measure Podium on one GPU in 21 minutes; ARGS=--dry: its code, on a CPU
	@$(or $(GPU_PYTHON),$(BIN)/python) -m bench.gpu $(ARGS)

gpu-wheels: $(STAMP)  ## pack what a GPU machine without a network lacks (about 12 MB) into .gpu-wheels
	@rm -rf $(GPU_WHEELS)
	@$(BIN)/pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
		--python-version $(GPU_PYTHON_VERSION) $(GPU_PLATFORMS:%=--platform %) -d $(GPU_WHEELS) \
		-c constraints.txt -r bench/gpu/wheels.txt
	@$(BIN)/pip wheel -q --disable-pip-version-check --no-deps -w $(GPU_WHEELS) . $(RUNTIME_PLUGINS:%=./%)
	@size=$$(du -sm $(GPU_WHEELS) | cut -f1); echo "$(GPU_WHEELS): $$size MiB"; ((size <= 64))

bench-peers: $(PEERS:%=.venvs/%/.installed)  ## install the peers that bench compares with, each in its own environment

##@ Help
help:  ## this list
	@awk 'BEGIN { FS = ":.*##" } /^##@/ { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*##/ { printf "  make %-12s%s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# One call installs the build of torch chosen here and everything else, so that pip says each thing once. A choice with
# options, such as an index, goes first and alone: they hold for torch only. Progress is shown unless this is a refresh.
$(RUNTIME): pyproject.toml constraints.txt $(RUNTIME_PLUGINS:%=%/pyproject.toml)
	@if [[ -z "$(PYTHON)" ]]; then \
		echo "Podium needs Python 3.11 or newer; python3 here is $$(python3 --version 2>&1 || true)." \
			"Install one, or name one: make $(or $(MAKECMDGOALS),env) PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@if [[ -e $@ ]]; then echo "refreshing the environment in .venv"; else \
		echo "creating the environment in .venv with $$($(PYTHON) --version), once: 1.6 GB with a torch for CPUs." \
			"pip's torch for Linux brings CUDA, several GB more: TORCH_SPEC=… names another"; \
		[[ -x $(BIN)/python ]] || $(PYTHON) -m venv .venv; fi
	@grep -v '^torch==' constraints.txt > .venv/constraints.txt
	@pip="$(BIN)/pip install --disable-pip-version-check $$([[ ! -e $@ ]] || echo -q)"; \
		$(if $(word 2,$(TORCH_SPEC)),$$pip $(TORCH_SPEC);) \
		$$pip -c .venv/constraints.txt $(firstword $(TORCH_SPEC)) -e . $(RUNTIME_PLUGINS:%=-e %)
	@touch $@

# The plugins go without what they require: each of their tests is skipped, and counted, where its library is absent.
$(STAMP): $(RUNTIME) $(PLUGINS:%=%/pyproject.toml)
	@echo "adding the development tools to .venv: about 0.8 GB at first"
	@{ grep -v '^torch==' constraints.txt; $(BIN)/pip freeze --disable-pip-version-check | sed -n '/^torch==/p'; } \
		> .venv/constraints.txt
	@$(BIN)/pip install -q --disable-pip-version-check -c .venv/constraints.txt -e '.[dev]'
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps $(PLUGINS:%=-e %)
	@touch $@

# A peer may have two more files: NAME.no-deps.txt lists packages that are installed without what they say they need, and
# NAME.unwanted.txt packages that are removed after everything is installed.
.SECONDEXPANSION:
.venvs/%/.installed: bench/peers/%.txt $$(wildcard bench/peers/$$*.no-deps.txt) $$(wildcard bench/peers/$$*.unwanted.txt)
	@[[ -n "$(PYTHON)" ]] || { echo "the peers need Python 3.11 or newer; name one with PYTHON=…" >&2; exit 1; }
	@[[ -x .venvs/$*/bin/python ]] || $(PYTHON) -m venv .venvs/$*
	@echo "installing the peer $* into .venvs/$*"
	@.venvs/$*/bin/pip install -q --disable-pip-version-check $(TORCH_SPEC)
	@.venvs/$*/bin/pip install -q --disable-pip-version-check -r $<
	@for file in $(filter %.no-deps.txt,$^); do \
		.venvs/$*/bin/pip install -q --disable-pip-version-check --no-deps -r "$$file"; done
	@for file in $(filter %.unwanted.txt,$^); do .venvs/$*/bin/pip uninstall -q -y -r "$$file"; done
	@touch $@

.PHONY: quickstart smoke real env check lint .lint-text .lint-types format test test-all test-ray test-seconds test-alone test-busy test-fast recipes docs fuzz test-monarch test-vllm test-clients test-newest test-wheel test-wheel-newest bench pictures soak chaos gpu gpu-wheels bench-peers help
