# make test   lint, types and tests (those marked gpu only where a CUDA device is present)
# make quick  the core in a minute: every family against stock, gradients, guard, registration, metadata; no lint
# make scripts the scripts of examples/ beside torchvision, whose processors read videos, too
# make matrix every cell of SUPPORT.md, every supported version, and transformers' own tests: more than an hour; see noxfile.py
# make support  SUPPORT.md and the blocks of docs/ that are declared in the source, written anew
# make tables   the tables of README.md and docs/ and README's chart, written anew from benchmarks/*.json
# make docs   the documentation, into build/docs
# make demo   the example, into build/demo; installs nothing that only the tests need
# All set up .venv first, and again after pyproject.toml or constraints.txt changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What pytest rewrites, and every process that tests start, is compiled once.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: test quick suite scripts lint style types matrix demo gpu-test support tables docs dist format clean
.DELETE_ON_ERROR:

test: style
	$(MAKE) -j 2 types suite scripts

QUICK := architecture checks families layout loading steady_call

quick: $(VENV)/.installed-test
	$(BIN)/pytest -q -n 2 --dist worksteal $(QUICK:%=tests/unit/test_%.py) -k "not replaced and not autocast"

suite: $(VENV)/.installed-test
	$(BIN)/pytest -q -n 2 --dist worksteal

# Beside a CPU build of torch, PyPI's torchvision is imported only with tests/stacks/site. So other programs see neither.
scripts: $(VENV)/torchvision
	PYTHONPATH=$(CURDIR)/$(VENV)/torchvision:$(CURDIR)/tests/stacks/site $(BIN)/pytest -q tests/examples/test_scripts.py

$(VENV)/torchvision: $(VENV)/.installed-test
	$(PIP) install -c constraints.txt --no-deps --upgrade --target $@ torchvision
	touch $@

lint: style types

style: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

demo: $(VENV)/.installed-examples
	@echo "demo: draw scenes, caption them stock and patched, show both in build/demo/contact_sheet.png: about a minute"
	$(BIN)/python examples/demo.py --output build/demo

gpu-test: $(VENV)/.installed-test,cuda
	$(BIN)/pytest -q -m gpu

matrix: $(VENV)/.installed-test,matrix
	$(BIN)/nox

support: $(VENV)/.installed-test
	$(BIN)/python docs/writers/support_table.py

tables: $(VENV)/.installed-test
	$(BIN)/python docs/writers/tables.py

docs: $(VENV)/.installed-test
	$(BIN)/mkdocs build --strict

dist: $(VENV)/.installed-test
	$(BIN)/hatchling build -d dist

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stem names groups of requirements and extras. The extra `examples` is always installed.
# The constraint holds any build of that torch version, so an installed one is never replaced.
comma := ,
empty :=
space := $(empty) $(empty)
GROUPS := docs matrix test
named = $(subst $(comma), ,$*)
extras = $(subst $(space),$(comma),$(sort examples $(filter-out $(GROUPS),$(named))))
groups = $(addprefix --group ,$(filter $(GROUPS),$(named)))
$(VENV)/.installed-%: pyproject.toml constraints.txt
	@echo "set-up, 1 of 2, only once: make a virtual environment in $(VENV): some 5 seconds"
	$(PYTHON) -m venv $(VENV)
	@echo "set-up, 2 of 2, only once: install this package for $*; torch alone may be 2 GB: some minutes"
	$(if $(groups),$(PIP) install 'pip>=25.1')
	$(PIP) install -c constraints.txt -e '.[$(extras)]' $(groups)
	touch $@
