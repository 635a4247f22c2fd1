# Everything a fresh machine needs: `make train` and `make test` set up .venv by themselves.
#
#   make train      install, then train a small GPT with stage 3 on two local CPU ranks
#   make test       install with the developer tools, then lint, types and tests
#   make test-all   the same with every test: whole products, every kill and every place
#   make lint       lint and types only
#   make setup      install only
#   make bench      the CPU benchmark, zeor beside its peers
#   make test-gpu   the GPU tests, in whatever environment PYTHON is (default: python3)
#   make clean      remove .venv and every cache
#
# Another interpreter: make PYTHON=python3.12 train. Options for training: make train ARGS="--stage 2".

PYTHON ?= python3
ARGS ?=
# Test files that run at a time, each with ranks of its own: they mostly wait for each other, so two fill two cores.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
# Long files first, as tests/conftest.py sorts them; xdist by itself begins with those of many tests.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
# A stamp is newer than these only if the install that made it saw their present contents.
INPUTS := pyproject.toml constraints.txt

# As a plain path: with setuptools' finder a script beside the clone would import the clone's folder in zeor's place.
EDITABLE := --config-settings editable_mode=compat

.PHONY: train test test-all lint setup test-gpu bench clean

train: $(VENV)/installed
	$(BIN)/python -m zeor.tools.cli train $(ARGS)

test: lint
	$(PYTEST) $(ARGS)

# An empty -m takes what pyproject.toml leaves out by default: the tests marked `whole`.
test-all: lint
	$(PYTEST) -m "" $(ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(VENV)/installed

bench: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.cpu_ranks $(ARGS)

# Not in .venv: constraints.txt holds the CPU build of torch, and a GPU machine brings its own.
test-gpu:
	$(PYTHON) -m pytest -m gpu $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed: $(INPUTS) | $(VENV)/bin/python
	@echo "installing zeor into $(VENV) (torch is large: some minutes the first time)"
	@$(PIP) -c constraints.txt -e . $(EDITABLE)
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing the developer tools into $(VENV)"
	@$(PIP) -c constraints.txt -e '.[dev]' $(EDITABLE)
	@touch $@

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "there is no $(PYTHON) here; name your Python 3.10 or newer: make PYTHON=... $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "zeor needs Python 3.10 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
			"name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; \
		exit 1; }
