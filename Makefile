# Everything starts from nothing: each target makes .venv from the pinned constraints.txt if it is not there yet.
# With TORCH=2.11.0 it is .venv-2.11.0, where only torch's version is another.
PYTHON ?= python3
TORCH  ?=
VENV   := .venv$(TORCH:%=-%)
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format lock bench results docs clean

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
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[demo,network,hf,dev]'
	@touch $@

demo: $(STAMP)  ## run the main job: a private recogniser from 1,200 synthetic people (about 4 minutes)
	$(BIN)/sottovoce run demo

# CI runs them with MARKS='not long'.
test: $(STAMP)  ## run the tests, those of clients over a network included
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(if $(MARKS),-m '$(MARKS)')

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

docs: $(STAMP)  ## write docs/api.md from docstrings, and the tables of differences in the papers' READMEs
	$(BIN)/python docs/write_api.py
	$(BIN)/python docs/write_differences.py

lock: $(STAMP)  ## write constraints.txt anew from what is installed in .venv
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt

clean:  ## remove .venv and everything the demo made
	rm -rf $(VENV) runs/demo runs/demo-* stores/demo-people stores/demo-crowd stores/demo-studio
