# Everything that a person does with this tree. `make demo` and `make test` need Python 3.11 and g++, no more.
#
#   PYTHON       the interpreter that makes .venv            (default: python3.11, else python3)
#   TORCH_INDEX  a package index to take torch from, where the usual one would bring a CUDA build (default: none)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
WORKERS ?= 2
# the demo can be given its own prompt or flags:  make demo ARGS="--skip inductor"
ARGS ?=

TEST_ASCEND := pytest pytest-xdist hypothesis
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-isa test-ascend check format bench doctor clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.k31-base  ## the main job on real text: compile a small model, generate, compare
	$(BIN)/k31 demo $(ARGS)

# -P: with this folder on Python's path transformers would take our link kernels for the package of that name.
test: check  ## lint, types and the quick tests
	$(BIN)/python -P -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

test-all: check  ## lint, types and every test
	$(BIN)/python -P -m pytest -n $(WORKERS) $(ARGS)

test-isa: $(VENV)/.k31-dev  ## the kernels held to AVX2, compiled for AVX-512, and on aarch64 under emulation
	$(BIN)/python -P -m pytest -n $(WORKERS) --dist loadfile -rs tests/kernels/test_isa.py tests/kernels/test_aarch64.py $(ARGS)

test-ascend: .venv-ascend  ## graphs for Ascend through the real torchair, without a device: a venv of its own
	.venv-ascend/bin/python -P -m pytest -n $(WORKERS) -m "not slow" tests/ascend tests/targets/test_ascend_*.py tests/targets/test_delta_chunk.py $(ARGS)

check: $(VENV)/.k31-dev  ## lint and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.k31-dev  ## format the tree and repair what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.k31-base  ## measure against eager and Inductor
	$(BIN)/k31 bench $(ARGS)

doctor: $(VENV)/.k31-base  ## what this machine has and lacks
	$(BIN)/k31 doctor

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) .venv-ascend build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch comes first, alone and pinned: a range left to the resolver could bring a CUDA build of gigabytes.
$(VENV)/.k31-base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(PIP) -e .
	touch $@

# torch_npu breaks `import torch` where there is no CANN, so it is nobody else's; its own dependencies go unsaid by it.
.venv-ascend: pyproject.toml
	test -x $@/bin/python || $(PYTHON) -m venv $@
	$@/bin/python -m pip --disable-pip-version-check install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$@/bin/python -m pip --disable-pip-version-check install --quiet -e ".[ascend]" $(TEST_ASCEND)
	touch $@

$(VENV)/.k31-dev: $(VENV)/.k31-base
	$(PIP) -e ".[hf,dev]"
	touch $@
