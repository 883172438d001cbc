PYTHON ?= python3
OLDEST_PYTHON ?= python3.10
BIN := .venv/bin
STAMP := .venv/.installed
FOLDERS := $(wildcard src tests examples benchmarks recipes docs)

# Tests start many processes, which should not compile what they import each time anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint types docs unit clean workflows coverage oldest wheel tag-check publish-docs

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv with the package and its development tools

# The pins reach the isolated build of the package too: through PIP_CONSTRAINT in older versions of
# pip, through PIP_BUILD_CONSTRAINT in newer ones. Python compiles what is imported; pip would
# compile everything there is, which takes a minute.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 5) and \
		"The pinned tools need Python 3.11.5 or newer: make PYTHON=... (this is " + sys.version + ")")'
	@echo "installing into .venv"
	@$(PYTHON) -m venv .venv
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -e ".[dev]"
	@touch $@

demo: $(STAMP) ## a minute: MISA against AdamW and Muon, and on clients that hold one digit each
	@$(BIN)/python examples/demo.py

test: $(STAMP) ## everything that must pass: lint, types, docs, unit
	@$(MAKE) --no-print-directory -j 2 lint types docs unit

lint: $(STAMP) ## ruff: rules and formatting
	@$(BIN)/ruff check --quiet $(FOLDERS)
	@$(BIN)/ruff format --quiet --check $(FOLDERS)

types: $(STAMP) ## mypy, strict
	@$(BIN)/mypy

docs: $(STAMP) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict # with --quiet, warnings would not count

unit: $(STAMP) ## pytest, three processes of one thread each: some tests wait for others
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist loadgroup

workflows: $(STAMP) ## check the files of GitHub Actions against their schema
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml

coverage: $(STAMP) ## pytest as in unit, and which lines it runs, in coverage.xml
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist loadgroup --cov --cov-report=xml --cov-report=term

# Without what needs a newer Python or torch: frameworks, Flower, reinforcement learning.
oldest: ## the tests with the oldest supported Python and torch, in .venv-oldest
	@$(OLDEST_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10) and \
		"make oldest needs Python 3.10: make oldest OLDEST_PYTHON=... (this is " + sys.version + ")")'
	@$(OLDEST_PYTHON) -m venv .venv-oldest
	@PIP_CONSTRAINT=constraints-oldest.txt .venv-oldest/bin/python -m pip install -qq --no-compile \
		--disable-pip-version-check -e ".[test]"
	@OMP_NUM_THREADS=1 .venv-oldest/bin/pytest -q -n 3 --dist loadgroup

wheel: ## build the wheel and the source distribution into dist/
	@$(PYTHON) -m venv .venv-build
	@PIP_CONSTRAINT=constraints.txt .venv-build/bin/python -m pip install -qq \
		--disable-pip-version-check hatchling
	@.venv-build/bin/python -m hatchling build -d dist
	@rm -rf .venv-build

tag-check: ## check that TAG is v and the version of the package
	@version=$$(sed -n 's/^__version__ = "\(.*\)"$$/\1/p' src/torchpisa/__init__.py); \
		test "$(TAG)" = "v$$version" || { echo "the tag is '$(TAG)', the version $$version"; exit 1; }

publish-docs: $(STAMP) ## put the documentation of VERSION (a tag, or dev) on the branch gh-pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --push --update-aliases $(VERSION:v%=%) \
		$(if $(filter v%,$(VERSION)),latest)
	@$(if $(filter v%,$(VERSION)),$(BIN)/mike set-default --push latest)

clean: ## remove everything that is generated, .venv included
	@rm -rf .venv .venv-build .venv-oldest coverage.xml .coverage site dist build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find $(FOLDERS) -name __pycache__ -prune -exec rm -rf {} +
