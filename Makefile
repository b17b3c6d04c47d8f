# make demo    install into .venv and run the demo          make test    install the test tools and run the suite
# make check   format, lint, types, import floors           make soak    the long tests (SOAK_S seconds, default 1800)

VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
BUILT  := pyproject.toml constraints.txt $(wildcard native/*.c native/*.h)

.PHONY: demo test check soak clean

demo: $(VENV)/.installed-demo
	$(BIN)/headrace demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not soak"

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m soak -s

# One environment for everything: the extras only grow it.
$(VENV)/.installed-%: $(BUILT) | $(VENV)/bin/python
	$(PIP) --editable ".[$*]"
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist src/headrace/_native*.so src/*.egg-info
