# Everything starts from nothing: each target makes .venv from the pinned constraints.txt if it is not there yet.
# With TORCH=2.11.0 it is .venv-2.11.0, where only torch's version is another.
PYTHON ?= python3
TORCH  ?=
VENV   := .venv$(TORCH:%=-%)
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
NETWORK := .venv-network
PACKAGES := 'import sysconfig; print(sysconfig.get_path("purelib"))'

.DEFAULT_GOAL := help
.PHONY: help setup demo test network check format lock bench results docs clean

help:  ## print this help
	@echo "Sottovoce: speech recognition trained on speech that never leaves its speaker"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with everything pinned (the other targets do it by themselves)

# torch comes first and alone: with it in place no other package can pull in a different build.
$(STAMP): constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sottovoce needs Python 3.11 or later, found " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed '$(TORCH:%=s/^torch==.*/torch==%/)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[demo,dev]'
	@touch $@

demo: $(STAMP)  ## run the main job: a private recogniser from a synthetic crowd (about 5 minutes)
	$(BIN)/sottovoce run demo

# CI runs them with MARKS='not long'.
test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(if $(MARKS),-m '$(MARKS)')

# All files that skip where flwr is not installed. CI runs them with MARKS='not long_network'. Groups share a village.
network: $(NETWORK)/.installed  ## run the tests of clients over a network with real processes (minutes)
	$(NETWORK)/bin/python -m pytest --numprocesses auto --dist loadgroup $(if $(MARKS),-m '$(MARKS)') \
	  $$(grep --files-with-matches importorskip tests/deployment/test_*.py)

# flwr asks for older packages than those in constraints.txt. Its environment has these, and behind them, for all else,
# the packages of .venv: they are shared and not installed twice. (pip says that virtualenv would like a newer one.)
$(NETWORK)/.installed: $(STAMP)
	test -x $(NETWORK)/bin/python || $(BIN)/python -m venv $(NETWORK)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(PACKAGES))')" > "$$($(NETWORK)/bin/python -c $(PACKAGES))/behind.pth"
	$(NETWORK)/bin/python -m pip install --quiet --editable '.[federation]'
	@touch $@

check: $(STAMP)  ## format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## side-by-side measurements (minutes)
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/encoder_cpu.py
	$(BIN)/python benchmarks/privacy.py
	$(BIN)/python benchmarks/ranks.py
	sh benchmarks/peers/setup.sh
	$(BIN)/python benchmarks/peers.py tiny small --markdown docs/benchmarks-peers.md

results: $(STAMP)  ## write docs/RESULTS*.md, figures and results/*.md from the runs kept in results/*.zip
	$(BIN)/python benchmarks/results.py write

docs: $(STAMP)  ## write docs/api.md from the docstrings of what `sottovoce` exports
	$(BIN)/python docs/write_api.py

lock: $(STAMP)  ## write constraints.txt anew from what is installed in .venv
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt

clean:  ## remove .venv and everything the demo made
	rm -rf $(VENV) $(NETWORK) runs/demo runs/demo-seed runs/demo-crdnn* stores/demo-crowd stores/demo-studio
