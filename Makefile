# make test   lint, types and tests (those marked gpu only where a CUDA device is present)
# make matrix every cell of SUPPORT.md, every supported version, and transformers' own tests: more than an hour; see noxfile.py
# make support  SUPPORT.md, written anew
# make demo   the example, into build/demo; installs nothing that only the tests need
# All set up .venv first, and again after pyproject.toml or constraints.txt changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: test matrix demo gpu-test support format clean
.DELETE_ON_ERROR:

test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -n 2 --dist worksteal

demo: $(VENV)/.installed-examples
	$(BIN)/python examples/demo.py --output build/demo

gpu-test: $(VENV)/.installed-test,cuda
	$(BIN)/pytest -q -m gpu

matrix: $(VENV)/.installed-test,matrix
	$(BIN)/nox

support: $(VENV)/.installed-test
	$(BIN)/python tests/support.py

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stem names the extras. The constraint holds any build of that torch version, so an installed one is never replaced.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[$*]'
	touch $@
