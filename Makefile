# make demo and make test set up .venv themselves; test-oldest, lint, types and clean do the rest.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
OLDEST := .venv/oldest

.PHONY: demo test test-oldest lint types clean

demo: $(INSTALLED)
	$(BIN)/lamina demo

test: $(INSTALLED)
	$(BIN)/pytest

# The oldest supported transformers lies in a folder of its own, which comes before the newest one of .venv.
test-oldest: $(OLDEST)/.installed
	PYTHONPATH=$(abspath $(OLDEST)) $(BIN)/python -c "import transformers; print('transformers', transformers.__version__)"
	PYTHONPATH=$(abspath $(OLDEST)) $(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

# Caches and build outputs. To set up anew as well, delete .venv.
clean:
	rm -rf build dist src/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[demo,dev,eval]'
	touch $@

$(OLDEST)/.installed: $(INSTALLED) constraints-oldest.txt
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install --no-deps --target $(OLDEST) -r constraints-oldest.txt
	touch $@
