# Every target creates the virtual environment that it needs on first use.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One CPU thread per process: ranks share the cores, and another count would change the last bits.
export OMP_NUM_THREADS := 1
# Some virtual machines report AMX without enabling it: bf16 products then end with an illegal instruction.
export ONEDNN_MAX_CPU_ISA := AVX512_CORE_BF16
# Tests start hundreds of processes: without bytecode, each of them compiles the package again.
unexport PYTHONDONTWRITEBYTECODE
# Two test processes, whole files each, in the order of tests/conftest.py: many tests wait for a timeout or for ranks to
# start. PYTEST_ARGS adds options.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --package-durations $(PYTEST_ARGS)

.PHONY: venv train prove check docs test test-all test-engines wheels fuzz bench clean

venv: .venv/.run

.venv/.run: pyproject.toml constraints.txt
	@test -x $(BIN)/python || (echo "creating .venv"; $(PYTHON) -m venv .venv)
	@$(PIP) --editable '.[train]' --editable ./practice
	@touch $@

.venv/.dev: .venv/.run
	@$(PIP) --editable '.[check,test]'
	@touch $@

.venv/.docs: .venv/.run
	@$(PIP) --editable '.[docs]'
	@touch $@

.venv/.engines: .venv/.dev
	@$(PIP) --editable '.[engines]'
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
	$(BIN)/python -m pytest tests/repository -k "file or package or class or retired or version or area"

# The site, in site/. A broken link, a stale figure or an asset of another server is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

test: .venv/.dev
	$(PYTEST) -m "not long and not engines"

test-all: .venv/.dev
	$(PYTEST) -m "not engines"

# Runs under SLURM, Ray and torchrun on this machine, one after the other. What is not installed is skipped, and said.
test-engines: .venv/.engines
	$(BIN)/python -m pytest tests/ops/engines -rs $(PYTEST_ARGS)

# Builds both wheels, installs them into empty environments outside the checkout, and uses them there.
wheels: .venv/.dev
	$(BIN)/python -m tests.repository.check_wheels

# Random episodes for 20 minutes; FUZZ_ARGS="--seed 7 --minutes 60" changes that.
fuzz: .venv/.dev
	$(BIN)/python -m fuzz $(FUZZ_ARGS)

bench: .venv/.bench
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv runs site
