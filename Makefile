# Everything runs in .venv, which "setup" builds from constraints.txt the first time and after each change of it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEEPSPEED := deepspeed==0.19.8
AWEX := awex==0.9.0

export OMP_NUM_THREADS ?= 1

.PHONY: setup test mutants thorough lint types format demo bench peers clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv || \
	  { $(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(PIP) install -q -c constraints.txt setuptools wheel hatchling editables torch==2.13.0
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) install -q -c constraints.txt --no-build-isolation $(DEEPSPEED)
	touch $(STAMP)

test: lint types
	$(BIN)/python -m pytest -q

thorough: $(STAMP)
	$(BIN)/python -m pytest -q --hypothesis-profile=thorough -m "stress or not stress"

mutants: $(STAMP)
	$(BIN)/python tests/mutants.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(STAMP)
	$(BIN)/python -m shardalg.cli.demo --wheels .demo

bench: $(STAMP) .bench/peers
	set -e; for script in benchmarks/[a-z]*.py; do $(BIN)/python $$script; done

peers: .bench/peers

.bench/peers: $(STAMP)
	$(PIP) install -q --no-deps --upgrade --target .bench/peers $(AWEX)

clean:
	rm -rf .venv .bench .demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
