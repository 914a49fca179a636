# Two commands are enough, on any machine with Python >= 3.10:
#   make demo    runs the main job            make test    runs what CI runs: lint, types, tests
# While you work: make quick (unit tests, at most 60 s), make lab (a Slurm cluster to try things on).
# Slow tests: make test-long. Tests on GPUs, with a table of MFU: make gpu. Timings: make bench, make bench-peers.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready-test

.PHONY: help demo test quick test-long gpu bench bench-peers lint types format clean

help:
	@sed -n '1,4s/^# *//p' Makefile

$(VENV)/bin/python:
	@echo "== creating a virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit("Python >= 3.10 is required, but this is " + sys.version.split()[0] + ": set PYTHON=python3.x") if sys.version_info < (3, 10) else None'
	@$(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "== installing python3-venv"; apt-get update -qq && apt-get install -qq -y python3-venv && $(PYTHON) -m venv $(VENV); \
	  else \
	    echo "error: python3 -m venv failed: install python3-venv"; exit 1; \
	  fi; }

# On a terminal pip shows its progress; in a log only its errors.
PIP_INSTALL = quiet=-q; [ ! -t 1 ] || quiet=; \
  $(BIN)/python -m pip install $$quiet --disable-pip-version-check -c constraints.txt

# With PYTHONDONTWRITEBYTECODE every start would compile again, and imports would take twice as long.
$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "== installing gptctl and torch (a minute or two)"
	@$(PIP_INSTALL) -e '.[train]'
	@[ ! -t 1 ] || echo "== compiling all packages to bytecode, for faster starts"
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m compileall -qq $(VENV)/lib gptctl trainer || true
	@touch $@

$(READY): $(VENV)/.ready
	@echo "== installing the packages that tests need"
	@$(PIP_INSTALL) -e '.[train,test]'
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m compileall -qq $(VENV)/lib || true
	@touch $@

demo: $(VENV)/.ready
	@mkdir -p demo
	@set -e; PATH="$$PWD/$(BIN):$$PATH"; cd demo; \
	run() { echo "== $$*"; "$$@"; }; \
	[ -e config.yaml ] || run gptctl init; \
	run gptctl validate config; \
	run gptctl submit --nodes 2 --follow
	@printf '%s\n' "$$AFTER_DEMO"

# --follow ends with commands to try; they need this first.
define AFTER_DEMO
== to continue: cd demo; export PATH="$(CURDIR)/$(BIN):$$PATH"
endef
export AFTER_DEMO

# shellcheck checks the scripts; tests/lab runs a real Slurm and real ssh hosts; a browser opens reports. As root on Debian, install what they need
# without starting a daemon. Elsewhere, tests that need them are skipped and say why.
LAB_PACKAGES := slurmctld slurmd slurm-client slurm-wlm-basic-plugins slurmdbd munge mariadb-server \
                openssh-server openssh-client iproute2 util-linux procps
BROWSER_PACKAGES := chromium chromium-driver
.PHONY: tools
tools:
	@[ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null || exit 0; \
	export DEBIAN_FRONTEND=noninteractive; \
	lacking() { for name; do [ "$$(dpkg-query -Wf '$${db:Status-Status}' "$$name" 2>&1)" = installed ] || echo "$$name"; done; }; \
	install() { apt-get install -qq -y --no-install-recommends "$$@"; }; \
	policy=/usr/sbin/policy-rc.d; \
	for group in shellcheck "$(LAB_PACKAGES)" "$(BROWSER_PACKAGES)"; do \
	  set -- $$(lacking $$group); \
	  [ $$# != 0 ] || continue; \
	  echo "== installing $$*"; \
	  if [ ! -e $$policy ]; then \
	    trap "rm -f $$policy" EXIT; trap 'exit 130' INT TERM; \
	    printf '#!/bin/sh\nexit 101\n' > $$policy; chmod 755 $$policy; \
	  fi; \
	  { install "$$@" || { apt-get update -qq && install "$$@"; }; } > /dev/null 2>&1 || echo "== cannot install: $$*"; \
	done

# A shell on the login node of a cluster that stops when the shell exits: make lab LAB='--nodes 4 --ssh 3 --accounting'
.PHONY: lab
lab: $(READY) tools
	@$(BIN)/python -m tests.lab $(LAB)

# Most tests wait for processes, so two run at a time; benchmarks run alone.
JOBS ?= 2
test: $(READY) tools lint types
	@echo "== all tests, $(JOBS) at a time"
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m 'not long and not gpu' --ignore=tests/bench
	@echo "== benchmarks with time limits"
	@$(BIN)/python -m pytest -m 'not long and not gpu' tests/bench

quick: $(READY) lint types
	@echo "== unit tests"
	@$(BIN)/python -m pytest tests/unit

# lm-evaluation-harness and its fifty packages: only these tests use them.
$(VENV)/.ready-long: $(READY)
	@echo "== installing the packages that slow tests need"
	@$(PIP_INSTALL) -e '.[train,test,lm-eval]'
	@touch $@

test-long: $(VENV)/.ready-long
	@echo "== slow tests"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m long -s

gpu: $(READY)
	@$(BIN)/python -m tests.gpu
	@$(BIN)/python -m pytest -m 'gpu or not long' -s -rs tests/gpu

# Each bench adds its rows to bench.json; tests/bench/compare.py compares two of these files.
bench: $(READY)
	@[ -n "$$BENCH_MORE" ] || rm -f bench.json
	@$(BIN)/python tests/bench/startup.py
	@$(BIN)/python tests/bench/start.py
	@$(BIN)/python tests/bench/follow.py
	@$(BIN)/python tests/bench/top.py
	@$(BIN)/python tests/bench/training.py
	@$(BIN)/python tests/bench/measuring.py
	@$(BIN)/python tests/bench/report.py
	@$(BIN)/python tests/bench/checkpoints.py
	@$(BIN)/python tests/bench/export.py
	@$(BIN)/python tests/bench/compiling.py
	@$(BIN)/python tests/bench/parallel.py
	@$(BIN)/python tests/bench/launch.py
	@$(BIN)/python tests/bench/restart.py
	@$(BIN)/python tests/bench/data.py
	@$(BIN)/python tests/bench/generation.py

# Hugging Face's Trainer and Lightning, in a separate environment.
$(VENV)-peers/.ready: | $(VENV)/bin/python
	@echo "== installing Hugging Face Trainer and Lightning"
	@$(PYTHON) -m venv $(VENV)-peers
	@$(VENV)-peers/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy pyyaml transformers accelerate lightning
	@env -u PYTHONDONTWRITEBYTECODE $(VENV)-peers/bin/python -m compileall -qq $(VENV)-peers/lib || true
	@touch $@

bench-peers: $(VENV)-peers/.ready
	@$(VENV)-peers/bin/python tests/bench/peers.py

lint: $(READY)
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== bandit"
	@$(BIN)/bandit -q -c pyproject.toml -r gptctl trainer docs

types: $(READY)
	@echo "== mypy"
	@$(BIN)/mypy

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-peers demo dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
