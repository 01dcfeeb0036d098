# The commands of this project. `make demo` and `make test` need Python 3.11 and pip, nothing else.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo demo-elastic test tools lint bench clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt torch==2.13.0
	$(VENV)/bin/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.ready
	@$(RUN) examples/demo.py

# 4 ranks, then 2, then 3, then 1: the losses of a training that nobody disturbed.
demo-elastic: $(VENV)/.ready
	@$(RUN) examples/elastic.py

# What a few tests use besides Python; where it cannot be installed, those tests say so and are skipped.
tools:
	@for t in strace xfs_io mkfs.ext4; do command -v $$t >/dev/null || missing=1; done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		(apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
			--no-install-recommends strace xfsprogs e2fsprogs) >/dev/null 2>&1 || true; fi

test: $(VENV)/.ready tools
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
