# Every target sets up what it needs: .venv, packages and the base model, once.
PYTHON ?= python3
RUN := .venv/bin/python -m

.PHONY: help setup demo test bench check lint format docs clean

help:
	@echo "make demo    set up, then serve the demo on http://127.0.0.1:8080"
	@echo "make test    set up, then run all tests"
	@echo "make bench   all benchmarks; one alone: .venv/bin/python -m benchmarks NAME"
	@echo "make check   ruff and mypy"
	@echo "make lint    ruff only"
	@echo "make format  let ruff rewrite what it can"
	@echo "make docs    rewrite docs/configuration.md from the settings"
	@echo "make clean   remove .venv and caches; the data in .loragate stays"

setup:
	@$(PYTHON) scripts/bootstrap.py

demo: setup
	@$(RUN) gateway demo $(if $(PORT),--port $(PORT))

test: setup
	@$(RUN) pytest

bench: setup
	@$(RUN) benchmarks

check: lint
	@$(RUN) mypy

lint: setup
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .

format: setup
	@$(RUN) ruff check --fix .
	@$(RUN) ruff format .

docs: setup
	@$(RUN) scripts.docs_configuration

clean:
	@rm -rf .venv .cache .ruff_cache .hypothesis dist build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
