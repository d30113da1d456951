# demo, test, test-full, bench, lint. Each makes .venv by itself; PYTHON chooses the interpreter it is made from.
PYTHON ?= python3
BIN := .venv/bin
PIP_FLAGS := -qq --disable-pip-version-check
PIP := $(BIN)/python -m pip install $(PIP_FLAGS)
# Two processes, a file each at a time: compiling, most of the work, keeps one core busy. `PARALLEL=` runs in one.
PARALLEL ?= -n 2 --dist loadfile
# Machine code that is not optimised is made in half the time, most of what the quick tests take; `test-full` has it optimised.
QUICKLY := XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=0"
# Compiled programs are kept between runs.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS ?= 0.2

.PHONY: demo test test-full bench lint

demo: .venv/.train
	$(BIN)/python -m train demo

test: .venv/.test .venv-aot/.aot
	$(QUICKLY) $(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(PYTEST_ARGS)

test-full: .venv/.test .venv-aot/.aot
	$(BIN)/python -m pytest --hypothesis-profile=full $(PARALLEL) $(PYTEST_ARGS)

bench: .venv/.library
	$(BIN)/python -m benchmarks

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# A stamp a set of extras: an environment is installed once, and again when pyproject.toml changes.
.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.library: pyproject.toml | .venv/bin/python
	@echo "installing moejax into .venv"
	$(PIP) --editable .
	touch $@

.venv/.train: pyproject.toml | .venv/bin/python
	@echo "installing moejax and what training needs into .venv"
	$(PIP) --editable '.[train]'
	touch $@ .venv/.library

.venv/.test: pyproject.toml | .venv/bin/python
	@echo "installing moejax, what training needs and what the tests need into .venv"
	$(PIP) --editable '.[train,test]'
	touch $@ .venv/.train .venv/.library

.venv/.dev: pyproject.toml | .venv/bin/python
	@echo "installing moejax and the developers' tools into .venv"
	$(PIP) --editable '.[train,test,dev]'
	touch $@ .venv/.test .venv/.train .venv/.library

# Compilers for hardware that is not there, used by child processes: see the extra `aot` in pyproject.toml.
.venv-aot/.aot: pyproject.toml
	@echo "installing compilers for TPUs and GPUs into .venv-aot"
	test -x .venv-aot/bin/python || $(PYTHON) -m venv .venv-aot
	.venv-aot/bin/python -m pip install $(PIP_FLAGS) --editable '.[aot]' && touch $@ \
	  || { rm -rf .venv-aot; echo "they do not install on this machine: the tests that need them will be skipped"; }
