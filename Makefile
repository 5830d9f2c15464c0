# make demo      the same training with each method over a slow link: a table and a picture, in about four and a half minutes
# make test      the whole test suite
# make quickstart   train with one plain script on two ranks, in about a minute
# make horovod   build Horovod for the installed torch (minutes, once) and install it
# make imagenet-test   the tests of examples/imagenet, in an environment of their own with torchvision (5.5 GB)
# make lint      ruff and mypy
# make clean     remove the environment and everything else that make wrote here
#
# Everything is installed into .venv beside this file. PYTHON=python3.11 picks the interpreter; ARGS='-k buckets -x' goes
# on to pytest or to the demo. pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) are honoured, for example to
# take PyTorch's CPU-only build.

PYTHON ?= python3
ARGS ?=
VENV := .venv
IMAGENET := .venv-imagenet
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := requirements/constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo quickstart test horovod imagenet-test lint clean

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
	$(BIN)/python -m benchmarks.comparison $(ARGS)

quickstart: setup
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/quickstart.py $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

horovod: $(VENV)/.horovod

$(IMAGENET)/.installed: pyproject.toml
	$(PYTHON) -m venv $(IMAGENET)
	$(IMAGENET)/bin/python -m pip --disable-pip-version-check install --quiet torch==2.14.1 torchvision==0.29.1 \
	    tqdm rich pytest pytest-timeout hypothesis
	$(IMAGENET)/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[tensorboard]'
	touch $@

imagenet-test: $(IMAGENET)/.installed
	CUDA_VISIBLE_DEVICES= $(IMAGENET)/bin/python -m pytest tests/imagenet $(ARGS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(IMAGENET) out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
