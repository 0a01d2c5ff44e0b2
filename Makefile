# Every target sets up what it needs: .venv, and for test-vllm an environment of its own inside it.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
OLDEST := .venv/oldest
VLLM := .venv/vllm

.PHONY: demo test test-oldest test-vllm lint types clean

demo: $(INSTALLED)
	$(BIN)/lamina demo

test: $(INSTALLED)
	$(BIN)/pytest

# The oldest supported transformers lies in a folder of its own, which comes before the newest one of .venv.
test-oldest: $(OLDEST)/.installed
	PYTHONPATH=$(abspath $(OLDEST)) $(BIN)/python -c "import transformers; print('transformers', transformers.__version__)"
	PYTHONPATH=$(abspath $(OLDEST)) $(BIN)/python -m pytest

# vLLM on a CPU. The CPU build of torch comes from https://download.pytorch.org/whl/cpu (PIP_EXTRA_INDEX_URL) where the
# package index has none.
test-vllm: $(VLLM)/.installed
	PYTHONPATH=tests $(VLLM)/bin/python -m pytest tests/serving tests/attention/test_dense.py

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

$(VLLM)/.installed: pyproject.toml requirements-vllm.txt
	test -x $(VLLM)/bin/pip || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q --no-deps -r requirements-vllm.txt
	$(VLLM)/bin/python -m pip install -q --no-deps -e .
	touch $@
