# Works in a fresh clone: each target first creates what it needs, in .venv.
PYTHON ?= python3
VENV := .venv
WITNESS := .venv-witness
MUTANTS := .venv-mutants
LOWEST := .venv-lowest
SITE := .venv-site
PROCESSORS := $(shell nproc 2>/dev/null || echo 2)
# Two more than there are processors: tests wait for nodes, but each worker collects all tests, which takes 10 to 30 s of
# processor time, and more of them at the same time miss the time limits of what they test.
WORKERS ?= $(shell echo $$(( $(PROCESSORS) + 2 )))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Byte code is compiled at the first import: most of the installed modules are never imported.
INSTALL := $(PIP) install --no-compile
# Modules that most tests import: compiled once here, not by each of many processes at the same time.
COMMON := torchvision,torch.distributed.run,torch.utils.tensorboard asyncssh,moto.server,paramiko,rich hypothesis,sklearn.datasets
# A developer may have these set. Without byte code each process compiles what it imports, which doubles the time of the tests.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONUNBUFFERED

.DEFAULT_GOAL := help
.PHONY: help environment environments roots demo test test-all coverage lowest witness check lint types docs site bench mutants clean

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "on Debian: apt-get install python3-venv"; exit 1; }

# PyTorch is most of what is downloaded (3 GB with its CUDA libraries, about a minute on a fast line). One pip uses one
# processor, so several install the exact versions first (29 s instead of 69 s with 4 processors). A batch fails if a package
# has no wheel for this platform; the last pip installs what is missing.
$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV): cloudddp with the simulator, PyTorch and the test tools"
	@grep -v '^#' constraints.txt | xargs -P $(PROCESSORS) -n 10 $(INSTALL) --no-deps 2>$(VENV)/parallel-install.log || \
	  echo "not everything could be installed in parallel ($(VENV)/parallel-install.log)"
	@$(INSTALL) -c constraints.txt -e '.[sim,train,dev]'
	@$(PIP) check
	@printf '%s\n' $(COMMON) | xargs -P $(PROCESSORS) -I MODULES $(BIN)/python -c 'import MODULES'
	@touch $@

demo: $(VENV)/.installed  ## the whole job on this computer: 2 simulated nodes, real training, teardown
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash docs/demo.sh

RUN_TESTS = $(BIN)/python -m pytest --ignore=tests/witness --ignore=tests/lowest -n $(WORKERS) --dist loadgroup

test: $(VENV)/.installed  ## the fast tests: each verb, contract and attack once (tests/support/tiers.py)
	@$(RUN_TESTS) -m 'not slow' $(PYTEST)

test-all: $(VENV)/.installed  ## every test but those of `make witness` and `make lowest`
	@$(RUN_TESTS) $(PYTEST)

coverage: PYTEST = --cov --cov-report=term
coverage: test-all  ## the same, and which lines it ran; half as slow again

$(LOWEST)/.installed: pyproject.toml $(VENV)/.installed
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(@D)
	@$(BIN)/uv pip install --quiet --python $(@D)/bin/python --resolution lowest-direct -e '.[sim,stacks]' \
	  'hypothesis>=6.100' 'pytest>=8.3,<9.2' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6'
	@touch $@

lowest: $(LOWEST)/.installed  ## up, launch, pull and down with the lowest versions that pyproject.toml allows
	@$(LOWEST)/bin/python -m pytest tests/lowest tests/cli/test_dependencies.py tests/cli/test_mfa.py

# Programs by other authors, each in its own environment: their dependencies may conflict with ours.
$(WITNESS)/%/.installed: tests/witness/requirements-%.txt $(VENV)/.installed
	@rm -rf $(@D)
	@$(PYTHON) -m venv --without-pip $(@D)
	@$(PIP) --python $(@D)/bin/python install --no-compile $(OPTIONS) -r $<
	@touch $@

WITNESSES := $(patsubst %,$(WITNESS)/%/.installed,aws ray trainers)
$(WITNESS)/trainers/.installed: OPTIONS := --no-deps # they use PyTorch of $(VENV)

# The operating system of machine nodes: made by the first test that needs it, it would take minutes of that test's time limit.
roots: $(VENV)/.installed
	@CLOUDDDP_SIM_ROOTS="$(CURDIR)/$(WITNESS)/roots" $(BIN)/python -c 'from pathlib import Path; \
	  from cloudddp.simulator.hosts.machines import root_image; root_image.unavailable_reason() or root_image.ensure(Path(), print)'

witness: environments  ## the AWS CLI and `ray up` at the simulator, Slurm, real operating systems
	@$(BIN)/python -m pytest tests/witness -n 2

environment: $(VENV)/.installed

environments: environment $(WITNESSES) roots

check: lint types test  ## lint, types and the fast tests; CI runs all tests

lint: $(VENV)/.installed  ## ruff, the import contracts, the Python version of what runs on nodes
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYTHONPATH=infra/node $(BIN)/lint-imports
	@$(BIN)/vermin --target=3.9- --violations --no-tips --quiet infra/node/agent cloudddp/agent/protocol examples

types: $(VENV)/.installed  ## mypy --strict
	@$(BIN)/mypy
	@$(BIN)/mypy examples/ddp/train.py  # apart: its train.py has the name of the package train/

docs: $(VENV)/.installed  ## write the generated files: pages and pictures of docs/, the example's sbatch.sh
	@$(BIN)/python -m docs.reference
	@$(BIN)/python -m docs.record

$(SITE)/.installed: docs/requirements-site.txt
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	@touch $@

site: $(SITE)/.installed  ## build the manual with search, in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --quiet

bench: $(VENV)/.installed  ## print the figures of bench/
	@$(BIN)/python -m bench

$(MUTANTS)/.installed: bench/requirements-mutants.txt $(VENV)/.installed
	@rm -rf $(@D)
	@$(PYTHON) -m venv --without-pip $(@D)
	@$(PIP) --python $(@D)/bin/python install --no-compile -r $<
	@touch $@

mutants: $(VENV)/.installed $(MUTANTS)/.installed  ## change the code that must never be wrong, see whether tests notice: hours
	@$(MUTANTS)/bin/python bench/mutants.py $(ARGS)

clean:  ## remove the environments and caches
	rm -rf $(VENV) $(WITNESS) $(MUTANTS) $(LOWEST) $(SITE) build dist .mypy_cache .ruff_cache .pytest_cache .coverage* .import_linter_cache
