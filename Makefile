# Everything starts from nothing: each target makes .venv from the pinned constraints.txt if it is not there yet.
# With TORCH=2.11.0 it is .venv-2.11.0, where only torch's version is another. With OLDEST=1 it is .venv-oldest, where
# everything that the package needs is as old as pyproject.toml allows, without the extras that need newer versions. With
# NEWEST=1 it is .venv-newest, where everything is as new as it allows, without `network` and trackers, which need older
# versions.
PYTHON  ?= python3
TORCH   ?=
OLDEST  ?=
NEWEST  ?=
WORKERS ?= auto
VENV   := .venv$(TORCH:%=-%)$(OLDEST:%=-oldest)$(NEWEST:%=-newest)
PINS   := $(if $(NEWEST),,constraints$(OLDEST:%=-oldest).txt)
EXTRAS := demo,network,hf,export,mlflow,wandb,dev,site
OLD    := analysis,demo,whisper,dev
NEW    := analysis,demo,hf,export,whisper,dev,site
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The demo needs a third of what the tests need: a fresh clone installs no more for it.
DEMO   := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.installed-demo)

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format lock bench results docs site dist oldest clean

help:  ## print this help
	@echo "Sottovoce: speech recognition trained on speech that never leaves its speaker"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with everything pinned (the other targets do it by themselves)

# torch comes first and alone: with it in place no other package can pull in a different build. pip would compile every
# module, on one core. For the demo Python compiles those that are imported; for all else they are compiled on all cores,
# because tests take warnings for errors, also those of compiling other people's modules (some of which cannot be).
$(STAMP) $(VENV)/.installed-demo: $(PINS) pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sottovoce needs Python 3.11 or later, found " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed '$(TORCH:%=s/^torch==.*/torch==%/)' $(or $(PINS),/dev/null) > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(VENV)/constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(VENV)/constraints.txt --editable '.[$(if $(findstring demo,$(@F)),demo,$(if $(OLDEST),$(OLD),$(if $(NEWEST),$(NEW),$(EXTRAS))))]'
	$(if $(findstring demo,$(@F)),,-$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > $(VENV)/compiled.txt 2>&1)
	@touch $@

demo: $(DEMO)  ## run the main job: a private recogniser from 1,200 synthetic people (about 4 minutes)
	$(BIN)/sottovoce run demo

# CI runs them with MARKS='not long'.
test: $(STAMP)  ## run the tests, those of clients over a network included
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(if $(MARKS),-m '$(MARKS)') $(if $(OLDEST),-W ignore::DeprecationWarning)

check: $(STAMP)  ## format, lint (code and images), types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint deploy/Dockerfile*

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

docs: $(STAMP)  ## write docs/api.md, cli.md, verifying.md, the papers' tables of differences, and the notebooks' outputs
	$(BIN)/python docs/write_api.py
	$(BIN)/python docs/write_cli.py
	$(BIN)/python docs/write_differences.py
	$(BIN)/python docs/write_privacy_example.py
	$(BIN)/python docs/write_notebooks.py

# Built anew each time, so that a page that is gone leaves nothing behind. A warning is a broken link, or a page that
# docs/site/index.md does not name.
site: $(STAMP)  ## build the documentation as a site: build/site/index.html
	rm -rf build/site build/site-doctrees
	$(BIN)/python -m sphinx --builder html --jobs auto --quiet --fail-on-warning -c docs/site -d build/site-doctrees . build/site
	@echo "build/site: $$(find build/site -name '*.html' | wc -l) pages, $$(du -sh build/site | cut -f1), 0 warnings"

# CI runs it: files, an environment with what the wheel declares, commands, examples and a run.
dist: $(STAMP)  ## build sdist and wheel, and try the wheel in an environment of its own
	$(BIN)/python .ci/wheel.py

# A version that is not there, or not together with the others, fails. It installs nothing.
oldest: $(STAMP)  ## check that the oldest versions that pyproject.toml allows can be installed together
	$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --constraint constraints-oldest.txt '.[$(OLD)]'

lock: $(STAMP)  ## write constraints.txt anew from what is installed in .venv
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt

clean:  ## remove .venv and everything the demo made
	rm -rf $(VENV) runs/demo runs/demo-* stores/demo-people stores/demo-crowd stores/demo-studio
