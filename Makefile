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

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-trainers test-page test-release bench gpu docs lint clean

help: ## Show this help
	@echo "usage: make <target>"
	@sed -n 's/^\([a-z-]*\): .*## /  \1|/p' $(firstword $(MAKEFILE_LIST)) | awk -F '|' '{ printf "%-15s %s\n", $$1, $$2 }'

train: $(READY) ## Train a language model over STAGES=4 processes with balanced memory, for STEPS=... steps
	@GLOO_SOCKET_IFNAME=$${GLOO_SOCKET_IFNAME:-$(LOOPBACK)} OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
		$(TORCHRUN) examples/train_gpt.py $(if $(STEPS),--steps $(STEPS)) $(ARGS)

test: $(READY) ## Run the tests, two at a time; ruff and mypy are among them
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/python -m pytest --numprocesses 2 --dist worksteal $(ARGS)

# pytest ends with 5 where nothing was selected.
test-all: $(READY) ## Run the exhaustive tests, which `make test` leaves out
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/python -m pytest --numprocesses 2 --dist worksteal -m exhaustive $(ARGS) \
		|| [ $$? -eq 5 ]

test-trainers: $(TRAINERS)/.ready ## Run bpipe inside torchtitan, Modalities and Accelerate, from a virtual environment of their own
	$(TRAINERS)/bin/python -c 'import accelerate, modalities, torchtitan, transformers'
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(TRAINERS)/bin/python -m pytest tests/trainers $(ARGS)

test-page: $(READY) ## Test the page to play with in Chromium; needs npm, and apt-get install chromium or the like
	@command -v chromium >/dev/null || { echo "no chromium here: install it, such as by apt-get install chromium"; exit 1; }
	$(VENV)/bin/python -m docs.play
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/python -m pytest -m exhaustive tests/tools/test_play_in_browser.py $(ARGS)

test-release: $(READY) ## Install the packages on every Python and PyTorch that can be had; ARGS=--write for docs/versions.md
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/python -m tests.release $(ARGS)

bench: $(READY) ## Measure what bpipe costs beside its alternatives, all studies or STUDIES="...", into benchmarks/RESULTS.md
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/python -m benchmarks $(STUDIES)

gpu: $(READY) ## Run on this machine's GPUs what takes one, ten minutes at most, into bpipe-gpu.md, to be pasted into an issue
	$(VENV)/bin/python -m bpipe gpu $(ARGS)

docs: $(READY) ## Build the documentation's site into site/; open site/index.html from disk
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict $(ARGS)

lint: $(READY) ## Check style and types only
	$(VENV)/bin/ruff check $(wildcard $(PATHS))
	$(VENV)/bin/mypy

clean: ## Remove what builds and tests leave; .venv, .venv-trainers and runs/ stay
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(TRAINERS)/*' -prune -exec rm -rf {} +

$(READY): setup.py pyproject.toml bpipe/extras.py
	@echo "Making $(VENV): PyTorch, bpipe and its tools. The first time takes some minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,examples]'
	@touch $@

# torchtitan imports triton, which runs nothing on CPU.
$(TRAINERS)/.ready: tests/trainers/requirements.txt
	@echo "Making $(TRAINERS): PyTorch, torchtitan, Modalities and Accelerate. The first time takes some minutes."
	@$(PYTHON) -m venv $(TRAINERS)
	@$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps triton
	@$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $< --editable .
	@touch $@
