# make sweep   tune a small problem on this machine, then train one step with what was found
# make test    lint, type check and the whole test suite
# make lint    the first two of these
#
# Each sets up .venv by itself, once. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: sweep test lint setup clean

sweep: $(READY)
	@$(BIN)/flce-tune sweep --preset demo --train-step

test: lint $(VENV)/transformers-4
	$(BIN)/pytest -n 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(READY)

$(READY): pyproject.toml constraints.txt scripts/setup
	@scripts/setup $(VENV) $(PYTHON)
	@touch $@

# the transformers before the current one, for the tests that run with both
$(VENV)/transformers-4: $(READY) scripts/transformers-4
	@scripts/transformers-4 $@
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
