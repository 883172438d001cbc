PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
FOLDERS := $(wildcard src tests examples benchmarks recipes docs)

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint types docs unit clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv with the package and its development tools

# The pins reach the isolated build of the package too: through PIP_CONSTRAINT in older versions of
# pip, through PIP_BUILD_CONSTRAINT in newer ones.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 5) and \
		"The pinned tools need Python 3.11.5 or newer: make PYTHON=... (this is " + sys.version + ")")'
	@echo "installing into .venv"
	@$(PYTHON) -m venv .venv
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		$(BIN)/python -m pip install -qq --disable-pip-version-check -e ".[dev]"
	@touch $@

demo: $(STAMP) ## train on ten clients that share hardly a label, with six algorithms
	@$(BIN)/python examples/federated.py

test: lint types docs unit ## everything that must pass: lint, types, docs, unit

lint: $(STAMP) ## ruff: rules and formatting
	@$(BIN)/ruff check --quiet $(FOLDERS)
	@$(BIN)/ruff format --quiet --check $(FOLDERS)

types: $(STAMP) ## mypy, strict
	@$(BIN)/mypy

docs: $(STAMP) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict # with --quiet, warnings would not count

unit: $(STAMP) ## pytest, two processes of one thread each
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadgroup

clean: ## remove everything that is generated, .venv included
	@rm -rf .venv site dist build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find $(FOLDERS) -name __pycache__ -prune -exec rm -rf {} +
