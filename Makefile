# The commands of this project. `make demo` and `make test` need Python 3.11 and pip, nothing else.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint bench clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt torch==2.13.0
	$(VENV)/bin/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.ready
	@$(RUN) examples/demo.py

test: $(VENV)/.ready
	$(RUN) -m pytest -q -n 2

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

.venv-bench/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet -c constraints.txt torch==2.13.0
	.venv-bench/bin/pip install --quiet -c constraints.txt -e '.[bench]'
	touch $@

bench: .venv-bench/.ready
	.venv-bench/bin/python -m bench $(ARGS)

clean:
	rm -rf $(VENV) .venv-bench build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
