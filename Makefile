# Everything runs in .venv, which is created on first use and updated when the locked
# packages change. In another environment, `pip install -c requirements.lock -e .` and the
# plain commands (kedro run, pytest, ...) have the same effect.

PYTHON ?= python3
BIN := .venv/bin
# Modules are compiled when they are first imported, not by pip. With this variable Python
# would not store them, and every command would spend seconds on compilation.
unexport PYTHONDONTWRITEBYTECODE
# Python's bundled pip needs a third longer for the packages. It is used if this version
# cannot be installed.
NEWER_PIP := $(BIN)/pip install --quiet --disable-pip-version-check pip==26.3
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c requirements.lock

.DEFAULT_GOAL := help
.PHONY: help run test slow lint format docs ui viz lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

$(BIN)/python:
	$(PYTHON) -m venv .venv
	$(NEWER_PIP) || true

.venv/runtime: pyproject.toml requirements.lock | $(BIN)/python
	$(INSTALL) -e .
	touch $@

.venv/dev: pyproject.toml requirements.lock | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	touch .venv/runtime $@

run: .venv/runtime ## split, tokenize, train and evaluate on the built-in corpus
	$(BIN)/kedro run

SLOW := slow
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test: .venv/dev ## run all tests except the slow ones
	$(PYTEST) -m 'not slow'

slow: .venv/dev ## run the tests that make test leaves out
	$(PYTEST) -m '$(SLOW)'

lint: .venv/dev ## run ruff, mypy (engine, strict) and the import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/dev ## apply ruff's fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/dev ## build the documents and the notebook as pages in build/docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/docs

ui: .venv/runtime ## serve MLflow on http://127.0.0.1:5000, or another port with PORT=...
	$(BIN)/kedro flatout ui $(if $(PORT),--port $(PORT))

viz: .venv/dev ## serve Kedro-Viz on http://127.0.0.1:4141, or another port with PORT=...
	$(BIN)/kedro viz run --host 127.0.0.1 $(if $(PORT),--port $(PORT))

lock: .venv/dev ## resolve requirements.lock again, for all supported Pythons
	$(INSTALL) uv
	printf 'torch==2.13.0\n' > .venv/constraints
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.10 \
	  --constraints .venv/constraints --upgrade --quiet --no-annotate --no-header \
	  --no-emit-index-url --no-emit-find-links --output-file requirements.lock

clean: ## remove .venv, caches and builds; data is kept
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
