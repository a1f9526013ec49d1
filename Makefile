# Every target does its own set-up: a virtual environment with pinned versions, made once and again when they change.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
ALONE := build/alone/bin/python
# Small nets and two test processes: more threads only wait for each other.
THREADS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help demo docs dist test test-slow lint format verify smoke clean
.DELETE_ON_ERROR:

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/lab ## Train at five batch sizes with both optimizers; figure and page in runs/demo
	$(BIN)/invariant-adam demo

verify: $(VENV)/lab ## Check the paper's theorems numerically
	$(BIN)/invariant-adam verify

smoke: $(VENV)/lab ## Run the paper's experiments in small, figures and report included; into runs
	for model in resnet-bn resnet-ln vit gpt; do $(THREADS) $(BIN)/invariant-adam reproduce $$model --preset smoke || exit 1; done

docs: $(VENV)/docs ## Build the documentation into site/: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(VENV)/release ## Build wheel and sdist into dist/, check them, and train with the wheel beside torch alone
	rm -rf dist build/alone
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/alone
	$(ALONE) -m pip --disable-pip-version-check --quiet install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(ALONE) -m pip --disable-pip-version-check --quiet install --no-index dist/*.whl
	cd build && $(THREADS) alone/bin/python ../examples/train_plain.py

test: $(VENV)/dev ## Run the tests, without the slow ones and those that need a GPU
	$(THREADS) $(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-slow: $(VENV)/zoo ## Run the slow tests
	$(THREADS) $(BIN)/python -m pytest -m "slow and not gpu"

lint: $(VENV)/dev ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and everything that was built, but not runs/
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# torch goes first and alone: with its version pinned exactly, pip takes the build that is on hand and nothing larger.
$(VENV)/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, e.g.: make PYTHON=python3.12")'
	@echo "Setting up $(VENV) (once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) install -c constraints.txt hatchling editables
	@touch $@

$(VENV)/lab $(VENV)/docs $(VENV)/dev: $(VENV)/%: $(VENV)/torch pyproject.toml
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[$*]'
	@touch $@

# The model zoos and trainers of the slow tests. The zoos without their own wishes, since torchvision would bring another
# torch, and in a folder of their own, since other packages break on a torchvision that does not fit their torch.
$(VENV)/zoo: $(VENV)/dev
	$(PIP) install -c constraints.txt --no-deps --upgrade --target $(VENV)/zoo-packages timm torchvision
	$(PIP) install -c constraints.txt peft trl
	@touch $@

$(VENV)/release: $(VENV)/torch
	$(PIP) install -c constraints.txt build twine
	@touch $@
