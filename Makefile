# The commands of this project. They need Python 3.11 or later and pip; as root, `make test` also installs three tools.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

# The tests start more than a hundred processes. Without bytecode files, each one compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: changelog chaos chromium compare demo demo-elastic demo-evaluate demo-tables man quick reference release-check site test test-chaos test-crash test-frameworks test-loops test-python test-site test-stores test-upstream tools servers lint ci bench clean

# pip 25.1 is the first that installs dependency groups.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt --upgrade 'pip>=25.1'
	$(VENV)/bin/pip install --quiet -c constraints.txt torch==2.13.0
	$(VENV)/bin/pip install --quiet -c constraints.txt -e . --group dev
	touch $@

# The other libraries whose states and files the tests use. torchvision cannot be imported beside the CPU build of
# PyTorch, and then torchmetrics cannot either: so it is in a folder of its own, which only tests/zoo uses.
# torchtitan asks for an older datasets than the newest huggingface_hub allows, so what it imports is listed.
TITAN := torchtitan torch_checkpointing spmd_types tyro docstring_parser typeguard einops
.zoo/.ready: $(VENV)/.ready
	$(VENV)/bin/pip install --quiet -c constraints.txt --group zoo || echo "Not installed: the packages of tests/zoo"
	$(VENV)/bin/pip install --quiet -c constraints.txt --no-deps --upgrade --target .zoo torchvision timm || \
		echo "Not installed: torchvision and timm, for tests/zoo"
	$(VENV)/bin/pip install --quiet -c constraints.txt --no-deps --upgrade --target .zoo $(TITAN) || \
		echo "Not installed: torchtitan, for tests/frameworks"
	mkdir -p .zoo && touch $@

# STORE=s3 or STORE=hdfs: with a real server, which this installs and starts.
WITH_STORE := $(if $(STORE),-m tests.stores.with_server $(STORE))

# The demos need PyTorch and the package only; with a real server, also the tools of the tests, which start it.
.venv-demo/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/pip install --quiet -c constraints.txt torch safetensors -e .
	touch $@

DEMO_VENV := $(if $(STORE),$(VENV),.venv-demo)
DEMO := $(DEMO_VENV)/bin/python $(WITH_STORE)

demo: $(DEMO_VENV)/.ready $(if $(STORE),servers)
	@$(DEMO) examples/demo.py

# 4 ranks, then 2, then 3, then 1: the losses equal those of an undisturbed training.
demo-elastic: $(DEMO_VENV)/.ready $(if $(STORE),servers)
	@$(DEMO) examples/elastic.py

# Another job scores the versions of a training, which stops by itself; the best version is exported.
demo-evaluate: $(DEMO_VENV)/.ready
	@$(DEMO) examples/demo_evaluate.py

.venv-demo/.ray: .venv-demo/.ready
	.venv-demo/bin/pip install --quiet -c constraints.txt ray
	touch $@

# Workers and servers of embedding tables on Ray are killed, and so is their driver: no bit of the result differs.
demo-tables: .venv-demo/.ray
	@.venv-demo/bin/python examples/demo_tables.py

# A few tests need more than Python. Where this cannot be installed, those tests are skipped with the reason.
install_tools = @for t in $(1); do command -v $$t >/dev/null || missing=1; done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		(apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
			--no-install-recommends $(2)) >/dev/null 2>&1 || true; fi

tools:
	$(call install_tools,xfs_io mkfs.ext4 sbatch,xfsprogs e2fsprogs slurm-client)

# The inner loop: under 90 seconds on two idle cores. A mistake in any layer below `integrations` shows here. What starts
# processes, waits, or counts long is marked `slow`.
QUICK := tests/test_packages.py tests/test_shape.py tests/docs/test_design.py tests/format tests/layout tests/data tests/sinks \
	tests/storage tests/state tests/snapshot tests/saving tests/loading tests/convert tests/run tests/cli tests/tasks \
	tests/notices tests/evaluation/test_schedule.py tests/evaluation/test_follower.py tests/evaluation/test_worker.py \
	tests/training/test_checkpointer.py tests/training/test_resume.py tests/tiers/test_memory_tier.py tests/tiers/test_peers.py \
	tests/ranks/test_commit.py tests/ranks/test_layouts.py tests/ranks/test_training.py

# PyTorch's idle threads would spin, and take the cores from the other workers of pytest.
chaos quick test test-crash test-frameworks test-loops test-stores: export OMP_WAIT_POLICY := PASSIVE

# Each new connection to a TCPStore asks the name server for the name of 127.0.0.1. A slow one takes 5 to 15 seconds.
chaos quick test test-crash test-frameworks test-loops test-stores: export RES_OPTIONS := timeout:1 attempts:1

quick: $(VENV)/.ready
	$(RUN) -m pytest -q -n 4 -m "not slow and not root" $(QUICK)

# All tests: about 10 minutes on 2 cores. Four workers: many tests wait for processes and deadlines.
# A few failed tests run once more, alone; the last lines name those that have a race.
test: .zoo/.ready tools
	@rm -f .pytest_cache/v/cache/lastfailed
	$(RUN) -m pytest -q -n 4 --dist worksteal --durations=20 || $(RUN) -m tests.again $$?

# What needs no PyTorch, in clean environments with Python 3.11 (without torch), 3.12, 3.13, and 3.14: those that are
# on this machine. There is no build of PyTorch for all of them.
test-python:
	@$(PYTHON) -m tests.pythons

# The frameworks again, in their oldest supported releases, each in an environment of its own. ARGS=lightning
test-frameworks: $(VENV)/.ready
	$(RUN) -m tests.frameworks.oldest $(ARGS)

# The frameworks' own tests, with Limpet in place of their checkpoints: ARGS="lightning=FOLDER", which has its sources.
test-upstream: .zoo/.ready
	$(RUN) -m tests.frameworks.upstream $(ARGS)

test-chaos: test-crash test-loops

# A minute of kill -9, a second training in the same run, and every command at once; then a short `make chaos`.
# -s: print what happened.
test-crash: $(VENV)/.ready
	$(RUN) -m pytest -q -s -m chaos tests/crash

# Trainings that are killed at each step, in all kinds of loops: about 4 minutes. The demos and a million boxes, too.
test-loops: $(VENV)/.ready
	$(RUN) -m pytest -q -n 3 -m chaos tests/loops tests/examples tests/loading

# 4 ranks on 2 hosts under signals, lost hosts, notices, flipped bits, and full disks. ARGS="--seconds 600 --seed 7"
chaos: $(VENV)/.ready
	$(RUN) -m tests.chaos $(ARGS)

# Real storage servers on loopback: what is missing of them. Debian packages need root; the rest goes to .servers.
servers:
	@$(PYTHON) -m tests.stores.install $(SERVERS)

demo demo-elastic: SERVERS := $(if $(filter hdfs,$(STORE)),hdfs,ceph)

# A server that cannot be installed is skipped, with a message. STORES=--require-servers: it fails instead.
test-stores: $(VENV)/.ready servers
	@rm -f .pytest_cache/v/cache/lastfailed
	$(RUN) -m pytest -q -n 4 --dist worksteal -m stores tests/stores --durations=10 \
		-o faulthandler_timeout=300 $(STORES) || $(RUN) -m tests.again $$? -m stores $(STORES)

# The table of docs/comparison.md: trainings that are killed and resumed, with Limpet and with the checkpoints of their
# frameworks. A minute on 2 cores.
compare: .zoo/.ready
	$(RUN) -m tests.frameworks.compare

# build/reference, from the docstrings of the public names.
reference: $(VENV)/.ready
	$(RUN) -m tests.docs.reference

.venv-site/.ready: constraints.txt
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/pip install --quiet -c constraints.txt zensical
	touch $@

# The documents and the reference as build/site. A link or an anchor that leads nowhere is an error.
site: reference .venv-site/.ready
	.venv-site/bin/python -m tests.docs.site

chromium:
	$(call install_tools,chromium chromedriver,chromium chromium-driver)

# The site in a browser: build/screenshots, and the search.
test-site: site chromium
	$(RUN) -m pytest -q -m site tests/docs/test_site.py

# The tools that build a release, apart from what Limpet is developed and tested with.
.venv-release/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet -c constraints.txt --upgrade 'pip>=25.1'
	.venv-release/bin/pip install --quiet -c constraints.txt --group release
	touch $@

# The package as a user gets it: built, installed without torch and with it, and used. TAG=v0.1.0: may it be released?
release-check: $(VENV)/.ready .venv-release/.ready
	@TAG=$(TAG) $(RUN) -m tests.release

# Moves the fragments of changes/ into a section of CHANGELOG.md. VERSION=0.2.0
changelog: .venv-release/.ready
	.venv-release/bin/towncrier build --yes --version $(VERSION)

# build/man, the manual pages of the commands.
man: $(VENV)/.ready
	$(RUN) -m tests.docs.man

# What CI runs. test-crash waits half of the time, so the others go on beside it.
ci: test
	$(MAKE) -j4 --output-sync=target lint test-python test-crash test-loops test-site release-check
	$(MAKE) test-stores STORES=--require-servers

lint: $(VENV)/.ready
	$(VENV)/bin/lint-imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --config-file bench/mypy.ini -p bench

# s3fs needs an older boto3 than the tests use: the group pins it.
.venv-bench/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet -c constraints.txt --upgrade 'pip>=25.1'
	sed '/^boto/d; /^awscrt/d' constraints.txt > .venv-bench/constraints.txt
	.venv-bench/bin/pip install --quiet -c constraints.txt torch==2.13.0
	.venv-bench/bin/pip install --quiet -c .venv-bench/constraints.txt -e . --group bench
	touch $@

bench: .venv-bench/.ready
	.venv-bench/bin/python -m bench $(ARGS)

clean:
	rm -rf $(VENV) .venv-demo .venv-release .venv-site .zoo .venv-bench .servers .pythons .oldest build dist .pytest_cache .mypy_cache .ruff_cache .cache .hypothesis
