# make demo      train on two ranks on this machine, in about a minute once installed
# make test      the whole test suite
# make horovod   build Horovod for the installed torch (minutes, once) and install it
# make lint      ruff and mypy
# make clean     remove the environment and everything else that make wrote here
#
# Everything is installed into .venv beside this file. PYTHON=python3.11 picks the interpreter; ARGS='-k buckets -x' goes
# on to pytest or to the demo. pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) are honoured, for example to
# take PyTorch's CPU-only build.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := requirements/constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test horovod lint clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(VENV)/.installed

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) $(VENV)/.created
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

$(VENV)/.horovod: requirements/build_horovod.sh requirements/horovod.cmake $(VENV)/.installed
	wheel=$$(requirements/build_horovod.sh $(BIN)/python) && \
	$(PIP) install --quiet --constraint $(CONSTRAINTS) "$$wheel" && \
	$(PIP) install --quiet --force-reinstall --no-deps "$$wheel"
	$(BIN)/python -c 'import horovod.torch'
	touch $@

demo: setup
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/quickstart.py $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

horovod: $(VENV)/.horovod

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
