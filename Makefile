# make serve        a real model behind the OpenAI API, its KV cache managed by KVDrive
# make serve-tiers  the same with a 48 MiB HBM arena, so that every mechanism is at work
# make test         lint, import contracts and the whole test suite
#
# MODEL=path-or-name HOST=127.0.0.1 PORT=30000 ARGS='--kvdrive-preset fast' VENV=.venv PYTHON=python3.11

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

MODEL ?= smollm2
HOST ?= 127.0.0.1
PORT ?= 30000
ARGS ?=
VENV ?= .venv
PYTHON ?= $(shell scripts/find-python)

BIN := $(VENV)/bin
CREATED := $(VENV)/.created
INSTALLED := $(VENV)/.installed
INSTALLED_FOR_TEST := $(VENV)/.installed-for-test
SERVE = $(BIN)/python -m sglang_kvdrive.cli.serve --die-with-parent --model '$(MODEL)' --host '$(HOST)' --port '$(PORT)' --

.PHONY: help
help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

.PHONY: serve
serve: preflight-serve $(INSTALLED)
	@exec $(SERVE) $(ARGS)

.PHONY: serve-tiers
serve-tiers: preflight-serve $(INSTALLED)
	@exec $(SERVE) --kvdrive-hbm 48MiB $(ARGS)

.PHONY: test
test: preflight $(INSTALLED_FOR_TEST)
	@$(BIN)/kvdrive model smollm2
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	@exec $(BIN)/python -m pytest $(ARGS)

.PHONY: preflight
preflight:
	@$(PYTHON) scripts/preflight.py --venv '$(VENV)' --installed '$(INSTALLED)'

.PHONY: preflight-serve
preflight-serve:
	@$(PYTHON) scripts/preflight.py --venv '$(VENV)' --installed '$(INSTALLED)' --host '$(HOST)' --port '$(PORT)'

# Order-only: the checks run first on every call, but only a changed pyproject.toml installs again.
$(INSTALLED): pyproject.toml | $(CREATED)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[model]'
	@touch $@

$(INSTALLED_FOR_TEST): pyproject.toml | $(CREATED)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[model,test]'
	@touch $(INSTALLED) $@

$(CREATED):
	$(PYTHON) -m venv '$(VENV)'
	@touch $@
