VENV ?= .venv
PYTHON ?= python3

BIN := $(VENV)/bin
# ArviZ announces its 1.0 release with a FutureWarning on every import.
RUN := $(BIN)/python -W ignore::FutureWarning:arviz

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help quickstart test docs bench lint format clean

help: ## Show this help
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

quickstart: $(VENV)/.installed-examples ## Run examples/quickstart.py, writes quickstart.png
	$(RUN) examples/quickstart.py

test: $(VENV)/.installed-test ## Run the tests, the doctests and the README's code
	$(BIN)/python -m pytest -n 2 -m "not slow" --durations=20 --doctest-modules tests numpyro_pdmp
	$(RUN) scripts/run_pages.py README.md

docs: $(VENV)/.installed-docs ## Build the site in docs/_build/html, notebooks executed
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(RUN) scripts/run_pages.py docs/own_sampler.md docs/warmup.md

bench: $(VENV)/.installed-examples ## Compare with peers; ARGS=--quick in ten minutes
	$(RUN) examples/benchmarks/bench.py $(ARGS)

lint: $(VENV)/.installed-lint ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy numpyro_pdmp

format: $(VENV)/.installed-lint ## Fix what the linter can fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv, caches and build products
	rm -rf .venv bench-results docs/_build .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info quickstart.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per extra; a stamp older than pyproject.toml reinstalls.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[$*]'
	@touch $@

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
