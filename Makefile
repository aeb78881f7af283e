# Two commands for everyone: `make demo` and `make test`. Both need python3 (3.11 or newer) and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
# The exact versions we test with; hatchling comes first because the package is built in this environment.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: help demo test lint format types imports unit-tests fuzz browser bench test-matrix test-recipes clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## the whole pipeline on small data: train, compress, finetune, compare, report; two or three minutes once installed
	$(BIN)/strucspars demo --out demo-output

test: lint types imports unit-tests ## everything that CI checks
	@echo "All checks passed."

lint: $(INSTALLED) ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED) ## rewrite the files in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED) ## static types
	$(BIN)/mypy

imports: $(INSTALLED) ## import contracts: one direction, no torch in the core
	$(BIN)/lint-imports --no-logo

# One thread per process, a process per core: the tests are many and small.
unit-tests: $(INSTALLED) ## tests, docstring and README examples
	@sh tools/browser.sh --if-possible
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal

fuzz: $(INSTALLED) ## property tests on new random examples; add what fails as an @example to its test
	HYPOTHESIS_PROFILE=fuzz OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal -m hypothesis tests

browser: ## Chromium and its driver, for the tests that open reports; needs root and apt
	sh tools/browser.sh

bench: $(INSTALLED) ## the solver against the original method, about 10 minutes on one core
	$(BIN)/python benchmarks/permutations.py

test-matrix: $(INSTALLED) ## every torchvision classifier and many of timm, about half an hour; writes docs/compatibility.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/compatibility.py

test-recipes: $(INSTALLED) ## every recipe of Table 2 for 1 + 1 epochs on generated images; writes results/table2_recipes.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/table2_recipes.py

clean: ## remove the environment and everything generated
	rm -rf $(VENV) demo-output build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(INSTALLED): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "strucspars needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11")'
	@echo "Creating $(VENV) and installing strucspars with its development tools (a few minutes the first time) ..."
	@$(PYTHON) -m venv --clear $(VENV) || { echo "python3 cannot create a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@
