# The checks by name; `make checks` is what a change must pass. Workers for the tests: make tests WORKERS=4
WORKERS ?= 2

.PHONY: install checks fast tests lint format types contracts docs

install:
	pip install -e ".[test]"

checks: lint types contracts tests

# A few seconds of schedules, optimizers and the house's rules, before anything longer.
fast:
	python -m pytest -n $(WORKERS) tests/test_house.py tests/schedules tests/optimizers

tests:
	python -m pytest -n $(WORKERS)

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

# The pages that are made from the code.
docs:
	python docs/make_configuration.py
