# The two commands: `make serve` and `make test`. Each sets up what it needs on first use and is quick afterwards.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
  $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL = -m pip install --disable-pip-version-check
# On a terminal pip draws its progress bars; elsewhere there is a line for each package.
SHOWN = $(if $(MAKE_TERMOUT),,| { grep --line-buffered -E '^(Collecting|Processing|Installing collected|Successfully)' || true; })
SHELL := bash
.SHELLFLAGS := -o pipefail -c
MODELS := all-minilm-l6-v2 smollm2-135m-instruct
WORKERS ?= 2
MINUTES ?= 10
BROWSER ?= .venv-browser
CLIENTS ?= .venv-clients
CLUSTER ?= .venv-cluster
DEPLOY ?= .venv-deploy
DOCS ?= .venv-docs
MONITOR ?= .venv-monitor
# Plugins that tests use, and not those that others bring. Compiled files are kept, for the processes that tests start.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --disable-plugin-autoload -p xdist -p anyio -p hypothesispytest
NODE_CLIENTS := ai@6.0.326 @ai-sdk/openai-compatible@2.0.87 zod@4.6.7
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

serve: $(VENV)/.serve models  ## run the service on 127.0.0.1:8000 (options: make serve ARGS="--port 9000")
	$(BIN)/archerfish serve $(ARGS)

test: $(VENV)/.test models lint types lines  ## what CI runs first: style, types, layers, tests (make test WORKERS=4)
	$(PYTEST) --numprocesses $(WORKERS) --dist worksteal $(ARGS)

test-sanitizers: $(VENV)/.test models  ## the native kernels again, compiled with checks of their memory accesses and arithmetic
	scripts/sanitizers/run $(BIN)/python --numprocesses $(WORKERS) $(ARGS)

coverage: $(VENV)/.test models  ## the tests again, and which lines they run
	$(PYTEST) -p pytest_cov --numprocesses $(WORKERS) --dist worksteal --cov --cov-report=term:skip-covered $(ARGS)

test-slow: $(VENV)/.test models  ## the long tests too
	$(BIN)/python -m pytest -m 'not hostile and not soak' $(ARGS)

test-hostile: $(VENV)/.test models  ## a campaign against a running service: hostile files and requests, slow clients, killed processes
	$(PYTEST) -m hostile tests/hostile $(ARGS)

test-soak: $(VENV)/.test models  ## mixed load on a service for ten minutes: no process may grow (make test-soak MINUTES=60)
	MINUTES=$(MINUTES) $(PYTEST) -m soak -s tests/hostile $(ARGS)

test-clients: $(VENV)/.test $(CLIENTS)/.ready models  ## a server, driven through other projects' clients: a table (ARGS="--only llm")
	$(CLIENTS)/bin/python -m scripts.clients --archerfish $(BIN)/archerfish $(ARGS)
	$(if $(wildcard tests/clients),PYTHONPATH=$$(echo $(CLIENTS)/lib/python*/site-packages) $(BIN)/python -m pytest -m client tests/clients)

test-cluster: $(VENV)/.test $(CLUSTER)/.ready models  ## the service on a Ray cluster of three nodes in network namespaces (as root)
	PYTHONPATH=$$(realpath $(CLUSTER)/lib/python*/site-packages) $(BIN)/python -m pytest -m cluster tests/deploy $(ARGS)

test-deploy: $(VENV)/.test $(DEPLOY)/.ready models  ## the Helm chart and the images' file: schemas, and every command in them against a real server
	PATH="$$PATH:$(CURDIR)/$(DEPLOY)/bin" PYTHONPATH=$$(echo $(DEPLOY)/lib/python*/site-packages) $(BIN)/python -m pytest -m cluster tests/kubernetes $(ARGS)

test-monitor: $(VENV)/.test $(MONITOR)/.ready models  ## a real Prometheus (Debian's package prometheus) and a collector on a server under load
	PYTHONPATH=$$(echo $(MONITOR)/lib/python*/site-packages) $(BIN)/python -m pytest -m monitor tests/monitor $(ARGS)

test-browser: $(VENV)/.test $(BROWSER)/.ready models  ## the web page in Chromium (Debian's package chromium, which root installs with it)
	PYTHONPATH=$$(echo $(BROWSER)/lib/python*/site-packages) $(BIN)/python -m pytest -m browser tests/browser $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/*.h

format: $(VENV)/.test  ## write Python and C++ as the formatters have it
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*.cpp csrc/*.h

types: $(VENV)/.test
	$(BIN)/mypy

lines: $(VENV)/.test  ## count lines of code by folder; fails above the limits of scripts/count_lines.py
	$(BIN)/python scripts/count_lines.py

bench: $(VENV)/.test models  ## compare with sentence-transformers (and others that are installed)
	$(BIN)/archerfish bench embed $(ARGS)

docs: $(VENV)/.test  ## write options.md, routes.md, python.md and the table of metrics.md in docs/ from declarations and docstrings
	$(BIN)/python -m scripts.options_page
	$(BIN)/python -m scripts.metrics_page
	$(BIN)/python -m scripts.reference_pages

docs-site: $(DOCS)/.ready  ## the documents as a site on http://127.0.0.1:8001
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve --dev-addr 127.0.0.1:8001 $(ARGS)

docs-check: $(DOCS)/.ready  ## build the site in build/site; fails at a broken link or anchor, or a page that asks another host
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	$(DOCS)/bin/python -m scripts.check_site build/site

models: $(VENV)/.serve
	@$(BIN)/archerfish pull $(MODELS)

pins: $(VENV)/.test  ## write constraints.txt from what is installed
	@(head -1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//') > .constraints.new
	@mv .constraints.new constraints.txt

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "archerfish needs Python 3.11 or newer with venv; set PYTHON=..." >&2; exit 1; }
	@echo "Making $(VENV) with $(PYTHON)"
	$(PYTHON) -m venv $(VENV)

NATIVE := CMakeLists.txt $(wildcard csrc/*)

$(VENV)/.serve: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	@echo "Installing archerfish and what it needs (once; a few minutes)"
	@$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[serve]' $(SHOWN)
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.serve
	@echo "Installing what the tests need (once)"
	@$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[serve,test]' $(SHOWN)
	@touch $@

$(CLIENTS)/.ready: scripts/clients/requirements.txt | $(VENV)/bin/python
	@echo "Installing the clients into $(CLIENTS) (once; a few minutes)"
	$(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python $(INSTALL) --requirement $< $(SHOWN)
	@npm install --silent --no-audit --no-fund --no-save --prefix $(CLIENTS) $(NODE_CLIENTS) \
	  || echo "npm could not install the Vercel AI SDK: its rows will be skipped"
	@touch $@

$(CLUSTER)/.ready: constraints-ray.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing Ray into $(CLUSTER) (once; a few minutes)"
	$(BIN)/python -m venv $(CLUSTER)
	@$(CLUSTER)/bin/python $(INSTALL) --constraint constraints.txt --constraint constraints-ray.txt 'ray[serve]' $(SHOWN)
	@touch $@

$(DEPLOY)/.ready: deploy/requirements.txt | $(VENV)/bin/python
	@echo "Installing the validators into $(DEPLOY) (once)"
	$(BIN)/python -m venv $(DEPLOY)
	@$(DEPLOY)/bin/python $(INSTALL) --requirement $< $(SHOWN)
	@touch $@

$(DOCS)/.ready: scripts/docs_requirements.txt | $(VENV)/bin/python
	@echo "Installing what makes the site into $(DOCS) (once)"
	$(BIN)/python -m venv $(DOCS)
	@$(DOCS)/bin/python $(INSTALL) --requirement $< $(SHOWN)
	@touch $@

$(MONITOR)/.ready: Makefile | $(VENV)/bin/python
	@echo "Installing a collector of traces into $(MONITOR) (once)"
	$(BIN)/python -m venv $(MONITOR)
	@$(MONITOR)/bin/python $(INSTALL) rotel==0.0.1a15 $(SHOWN)
	@touch $@

$(BROWSER)/.ready: Makefile | $(VENV)/bin/python
	@command -v chromium > /dev/null || { test $$(id -u) = 0 && apt-get update -qq && apt-get install -y -qq chromium; } \
	  || { echo "These tests need Chromium at /usr/bin/chromium: as root, apt-get install chromium." >&2; exit 1; }
	@echo "Installing what drives Chromium into $(BROWSER) (once)"
	$(BIN)/python -m venv $(BROWSER)
	@$(BROWSER)/bin/python $(INSTALL) playwright==1.65.2 $(SHOWN)
	@npm install --silent --no-audit --no-fund --no-save --prefix $(BROWSER) axe-core@4.14.0 \
	  || echo "npm could not install axe-core: its test will be skipped"
	@touch $@

clean:  ## remove the environment and caches of tools (models stay)
	rm -rf $(VENV) $(BROWSER) $(CLIENTS) $(CLUSTER) $(DEPLOY) $(DOCS) $(MONITOR) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage build dist *.egg-info

.PHONY: help serve test coverage test-slow test-sanitizers test-hostile test-soak test-browser test-clients test-cluster test-deploy test-monitor lint format types lines bench docs docs-site docs-check models pins clean
