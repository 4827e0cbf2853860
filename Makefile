# Two commands are promised: `make run` and `make test`. Everything they need is set up here.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
DATA ?= ./data

.PHONY: setup run test test-spark check format bench soak lock clean

setup: $(STAMP)

# Wheels are pinned by hash; the project itself is installed in place, without dependencies.
$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Sparrow needs Python 3.11 or newer; set PYTHON=/path/to/python3.11") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
	touch $(STAMP)

run: setup
	$(BIN)/sparrow up --data $(DATA)

# Many tests wait for a disk or another process, so three at a time keep two cores busy. The thousand seeds
# have the cores to themselves: they start two processes of their own.
SEEDS = tests/simulation/test_simulation.py

test: setup
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not soak" --ignore=$(SEEDS)
	$(BIN)/python -m pytest -q -m "not soak" $(SEEDS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python -m benchmarks

# All of Spark, also what takes minutes: exactly once under kills, the sample pipelines, compaction.
test-spark: setup
	$(BIN)/python -m pytest -q tests/spark tests/test_docs.py

soak: setup
	$(BIN)/python -m pytest -q -m soak -s

lock:
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	  --no-emit-index-url --output-file requirements.lock requirements-dev.in

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
