# Two commands do everything on a fresh machine: `make demo` and `make test`. Both create .venv when it is missing.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help setup demo test test-fast clients lint format bench clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Create .venv and install everything, pinned

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "dix needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch and the rest into $(VENV): several GB, minutes the first time, without further words"
	@# torch first and pinned, so that no other package pulls in a larger build of it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench,dev]'
	@touch $@

demo: setup  ## Serve the embedded model, chat, prove the cache, benchmark, report, stop
	@sh recipes/demo.sh $(BIN)/dix

test: setup lint  ## Lint, unit tests, end-to-end tests; not the marks slow and gpu
	$(BIN)/python -m pytest -n 2 -m "not gpu and not multi_gpu and not slow and not e2e"
	@# real servers need the cores for themselves
	$(BIN)/python -m pytest -m "e2e and not gpu and not multi_gpu and not slow"

test-fast: setup  ## Unit tests only
	$(BIN)/python -m pytest -m 'not gpu and not multi_gpu and not slow and not e2e'

clients: setup  ## Try the server with client libraries that others wrote
	test -x $(VENV)/clients/bin/python || $(PYTHON) -m venv $(VENV)/clients
	$(VENV)/clients/bin/python -m pip install --quiet --disable-pip-version-check -r recipes/clients.txt
	$(BIN)/python -m pytest tests/clients

lint: setup  ## ruff, mypy and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_import_rules.py

format: setup  ## Rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## The short benchmark against a server of its own
	@sh recipes/demo.sh $(BIN)/dix bench

clean:  ## Remove the environment and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
