# Needs make and Python 3.10 or later with pip and venv; everything else goes into .venv and .nox.

PYTHON ?= python3
ARGS ?=

NOX := .venv/nox/bin/nox
DEMO := .venv/demo/bin/specverify-dpex

.DEFAULT_GOAL := help
.PHONY: help demo test lint levelzero isa hub-kernel bench bench-full compile clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: .venv/demo/.stamp  ## decode English speculatively on this machine's SYCL device; options in ARGS="..."
	@$(DEMO) demo $(ARGS)

test: .venv/nox/.stamp  ## all the checks, in all the environments; options for pytest in ARGS="..."
	$(NOX) -- $(ARGS)

lint: .venv/nox/.stamp  ## ruff and mypy
	$(NOX) -s lint

levelzero: .venv/nox/.stamp  ## the Level Zero driver on an emulated GPU (Debian); options for pytest in ARGS="..."
	$(NOX) -s levelzero -- $(ARGS)

isa: .venv/nox/.stamp  ## the machine code of every GPU family, in docs/isa.md (Debian); options in ARGS="..."
	$(NOX) -s isa -- $(ARGS)

hub-kernel:  ## build/torch-xpu and build/torch-cpu, which the kernels library loads
	$(PYTHON) tools/hub_kernel.py

bench: .venv/nox/.stamp  ## time verify() beside other routes, in about two minutes; options in ARGS="..."
	$(NOX) -s bench -- $(ARGS)

bench-full: .venv/nox/.stamp  ## the same for every workload, in some hours; options in ARGS="..."
	$(NOX) -s bench -- --set full $(ARGS)

compile: .venv/nox/.stamp  ## compile the kernels again (Python 3.9 to 3.11)
	$(NOX) -s compile -- $(ARGS)

clean:  ## remove the environments and caches
	rm -rf .venv .nox build .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# In place, so that the demo runs what is in the checkout.
.venv/demo/.stamp: pyproject.toml
	@$(call new-venv,.venv/demo)
	@echo "Installing specverify-dpex and the demo's model ..."
	@.venv/demo/bin/python -m pip install --quiet --editable '.[demo]'
	@touch $@

.venv/nox/.stamp: pyproject.toml
	@$(call new-venv,.venv/nox)
	@.venv/nox/bin/python -m pip install --quiet 'nox>=2024.10.9'
	@touch $@

define new-venv
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python 3.10 or later is needed: make PYTHON=/path/to/python3"; exit 1; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) has no venv; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }; \
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef
