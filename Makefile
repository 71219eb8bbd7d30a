# Everything runs in .venv, made on first use and remade when the locked packages change.
# Inside an environment of your own, `pip install -c requirements.lock -e .` and the
# plain commands (kedro run, pytest, ...) do the same.

PYTHON ?= python3
BIN := .venv/bin
# Modules are compiled when they are first imported, not all of them by pip; where the
# shell forbids keeping that, every command would compile anew, for seconds.
unexport PYTHONDONTWRITEBYTECODE
# An older pip, as Python brings it, takes a third longer for the packages; where this one
# cannot be had, the older one does.
NEWER_PIP := $(BIN)/pip install --quiet --disable-pip-version-check pip==26.3
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c requirements.lock

.DEFAULT_GOAL := help
.PHONY: help run test slow lint format docs ui viz lock clean

help: ## this list
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

PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test: .venv/dev ## all tests but the slow ones
	$(PYTEST) -m 'not slow'

slow: .venv/dev ## the tests that take over 20 s each
	$(PYTEST) -m slow

lint: .venv/dev ## ruff, mypy (engine, strict), import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/dev ## let ruff write what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/dev ## these documents and the notebook as pages, in build/docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/docs

ui: .venv/runtime ## MLflow on http://127.0.0.1:5000; elsewhere with PORT=...
	$(BIN)/kedro flatout ui $(if $(PORT),--port $(PORT))

viz: .venv/dev ## Kedro-Viz on http://127.0.0.1:4141; elsewhere with PORT=...
	$(BIN)/kedro viz run --host 127.0.0.1 $(if $(PORT),--port $(PORT))

lock: .venv/dev ## resolve requirements.lock anew, for all supported Pythons
	$(INSTALL) uv
	printf 'torch==2.13.0\n' > .venv/constraints
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.10 \
	  --constraints .venv/constraints --upgrade --quiet --no-annotate --no-header \
	  --no-emit-index-url --no-emit-find-links --output-file requirements.lock

clean: ## remove .venv, caches and builds; data stays
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
