# Every target makes the virtual environment it needs on first use and is quick afterwards.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One CPU thread a process: ranks share the cores, and another count would change the last bits.
export OMP_NUM_THREADS := 1

.PHONY: venv train prove check test test-all bench clean

venv: .venv/.run

.venv/.run: pyproject.toml constraints.txt
	@test -x $(BIN)/python || (echo "making .venv (once)"; $(PYTHON) -m venv .venv)
	@$(PIP) --editable .
	@touch $@

.venv/.dev: .venv/.run
	@$(PIP) --editable '.[check,test]'
	@touch $@

.venv/.bench: .venv/.run
	@$(PIP) --editable '.[bench]'
	@touch $@

train: .venv/.run
	$(BIN)/meshwright train

prove: .venv/.run
	$(BIN)/meshwright prove

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest tests/test_repository.py -k "file or room"

test: .venv/.dev
	$(BIN)/python -m pytest -m "not long"

test-all: .venv/.dev
	$(BIN)/python -m pytest

bench: .venv/.bench
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv runs
