# Every target that needs Python packages makes .venv first, from setup.py; nothing is installed outside it.

PYTHON ?= python3
STAGES ?= 4
VENV := .venv
READY := $(VENV)/.ready
TRAINERS := .venv-trainers
PATHS := bpipe tests examples benchmarks docs setup.py

# Processes of one machine talk over its loopback interface, by address: no name is looked up.
LOOPBACK := $(if $(filter Darwin,$(shell uname)),lo0,lo)
TORCHRUN := $(VENV)/bin/torchrun --nnodes 1 --nproc-per-node $(STAGES) \
	--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1

# Modules are compiled when they are first imported, and kept, also where the environment says that nothing is to be written: pip
# takes a minute to compile all.
export PYTHONDONTWRITEBYTECODE :=

# Four tests at a time, because many wait for each other's processes; of those that take long, three.
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/python -m pytest
SIDE_BY_SIDE := --numprocesses 4 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-timed test-trainers test-page test-newest test-release bench gpu docs lint clean

help: ## Show this help
	@echo "usage: make <target>"
	@sed -n 's/^\([a-z-]*\): .*## /  \1|/p' $(firstword $(MAKEFILE_LIST)) | awk -F '|' '{ printf "%-15s %s\n", $$1, $$2 }'

train: $(READY) ## Train a language model over STAGES=4 processes with balanced memory, for STEPS=... steps
	@GLOO_SOCKET_IFNAME=$${GLOO_SOCKET_IFNAME:-$(LOOPBACK)} OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
		$(TORCHRUN) examples/train_gpt.py $(if $(STEPS),--steps $(STEPS)) $(ARGS)

test: $(READY) ## Run the tests, in four minutes: what each change should run
	$(PYTEST) $(SIDE_BY_SIDE) $(ARGS)

# pytest ends with 5 where nothing was selected: that is right for a part without any.
test-all: $(READY) ## Run all other tests, which `make test` leaves out: what each merge should run
	$(PYTEST) $(SIDE_BY_SIDE:4=3) --tier all --durations 20 $(ARGS) || [ $$? -eq 5 -a -n "$(ARGS)" ]

test-timed: $(READY) ## Run the tests that measure time, one after the other; on a busy machine they say so and decide nothing
	$(PYTEST) --tier timed $(ARGS) || [ $$? -eq 5 -a -n "$(ARGS)" ]

test-trainers: $(TRAINERS)/.ready ## Run bpipe inside torchtitan, Modalities and Accelerate, from a virtual environment of their own
	$(TRAINERS)/bin/python -c 'import accelerate, modalities, torchtitan, transformers'
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(TRAINERS)/bin/python -m pytest --tier every tests/trainers $(ARGS)

test-page: $(READY) ## Test the page to play with in Chromium; needs npm, and apt-get install chromium or the like
	@command -v chromium >/dev/null || { echo "no chromium here: install it, such as by apt-get install chromium"; exit 1; }
	$(VENV)/bin/python -m docs.play
	$(PYTEST) --tier every tests/tools/test_play_in_browser.py $(ARGS)

# uv asks the package index itself, whatever release pip is capped at on a machine.
test-newest: $(READY) ## Try the newest PyTorch of the package index: names, README's programs, and the tests closest to it
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9' || true
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/python -m tests.release --newest $(ARGS)

test-release: $(READY) ## Install the packages on every Python and PyTorch that can be had; ARGS=--write for docs/versions.md
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/python -m tests.release $(ARGS)

bench: $(READY) ## Measure what bpipe costs beside its alternatives, all studies or STUDIES="...", into benchmarks/RESULTS.md
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/python -m benchmarks $(STUDIES)

gpu: $(READY) ## Run on this machine's GPUs what takes one, ten minutes at most, into bpipe-gpu.md, to be pasted into an issue
	$(VENV)/bin/python -m benchmarks.gpu_check $(ARGS)

docs: $(READY) ## Build the documentation's site into site/; open site/index.html from disk
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict $(ARGS)

lint: $(READY) ## Check style, types, and that the package weighs no more than it may
	$(VENV)/bin/ruff check $(wildcard $(PATHS))
	$(VENV)/bin/mypy
	$(PYTEST) -q tests/test_house.py

clean: ## Remove what builds and tests leave; .venv, .venv-trainers and runs/ stay
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(TRAINERS)/*' -prune -exec rm -rf {} +

$(READY): setup.py pyproject.toml bpipe/extras.py
	@echo "Making $(VENV): PyTorch, bpipe and its tools. The first time takes some minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==2.13.0 --editable '.[test,examples]'
	@touch $@

# torchtitan imports triton, which runs nothing on CPU.
$(TRAINERS)/.ready: tests/trainers/requirements.txt
	@echo "Making $(TRAINERS): PyTorch, torchtitan, Modalities and Accelerate. The first time takes some minutes."
	@$(PYTHON) -m venv $(TRAINERS)
	@$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps triton
	@$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $< --editable .
	@touch $@
