# The checks by name; `make checks` is what a change must pass. Workers for the tests: make tests WORKERS=4
# Three on two cores: one waits for the SLURM cluster most of the time.
WORKERS ?= 3

.PHONY: install checks fast unmarked tests oldest lint format types contracts docs site

install:
	pip install -e ".[test]"

checks: lint types contracts tests

FAST = not slow and not slurm and not gpu and not browser

# The README's tests: what neither takes long nor needs SLURM, a GPU or a browser.
fast:
	python -m pytest -n $(WORKERS) -m "$(FAST)"

# The same, and a list of the tests that take more than a second of processor time: mark them slow.
unmarked:
	ASYNCPP_TEST_UNMARKED=1 python -m pytest -n $(WORKERS) -m "$(FAST)"

tests:
	python -m pytest -n $(WORKERS)

# Data and exports with the oldest versions that the extras allow, installed beside the others.
oldest:
	pip install --quiet --upgrade --target build/oldest \
	    $$(grep -oE '"(tokenizers|transformers|zstandard)>=[0-9.]+' pyproject.toml | sort -u | sed 's/"//; s/>=/==/')
	PYTHONPATH=$(CURDIR)/build/oldest python -m pytest tests/asyncpp_cli/data tests/stages/checkpoint/test_export.py \
	    tests/asyncpp_cli/commands/test_model_init.py tests/asyncpp_cli/commands/test_export_command.py

lint:
	ruff check .
	ruff format --check .

format:
	ruff check --fix .
	ruff format .

types:
	mypy

contracts:
	lint-imports

# Regenerates the pages and pictures that the program makes.
docs:
	python docs/make_configuration.py
	asyncpp schedule draw 1f1b 2bw --stages 4 --microbatches 8 --steps 4 --until 75 --out docs/images/1f1b-vs-2bw.svg
	asyncpp schedule draw 2bw --stages 2 --microbatches 2 --steps 3 --until 21 --out docs/images/2bw-two-stages.svg

# The first hour on a GPU: what gives most first, and a page of results.
gpu:
	python benchmarks/first_hour.py

# Builds the documents into build/site; needs: pip install -e ".[docs]"
site:
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
