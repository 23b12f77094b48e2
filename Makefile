# make run     every lesson headless; ends with the verdict and the path of the report
# make test    lint, every lesson again on the CPU, the tests
# make lab     the lessons in JupyterLab
# make bench   the benchmarks, in order
# make dry-run the instance's configs at full width on a fake 64-rank backend
# make outputs run the lessons with the cpu profile and commit-ready outputs in notebooks/
#
# Each creates .venv on first use. On a Neuron machine the active environment is used instead, and
# nothing that it has is replaced; NEURON=1 says so where the machine is not recognised. `run` then
# takes the profile trn2, elsewhere cpu; PROFILE=NAME or PROFILE=FILE.yaml is another. `test` takes
# cpu everywhere: committed outputs are a CPU's, and a test must not need a device or hold one.

SHELL := bash
.DELETE_ON_ERROR:
.PHONY: run test test-lessons test-code lab lint bench dry-run outputs

PYTHON ?= python3
ifndef NEURON
NEURON := $(shell \
	if command -v neuron-ls || test -x /opt/aws/neuron/bin/neuron-ls || \
		python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch_neuronx"))'; \
	then echo 1; fi 2>/dev/null | tail -n 1)
endif

ifeq ($(NEURON),1)
ENVIRONMENT := $(shell python -c 'import sys; print(sys.prefix)')
PY := python
PROFILE := trn2
else
ENVIRONMENT := .venv
PY := .venv/bin/python
PROFILE := cpu
endif
# Newer than pyproject.toml when what it asks for is installed.
INSTALLED := $(ENVIRONMENT)/.qwen3-trainium-installed

run: $(INSTALLED)
	$(PY) -m qwen3_trainium run --profile $(PROFILE) --overwrite

# Side by side: each alone leaves cores idle while its processes start. Each prints when it ends.
test: lint
	@echo "The lessons and the tests run side by side; each prints when it ends."
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-lessons test-code

test-lessons:
	$(PY) -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=1800 --timeout=1800 \
		--nbval-sanitize-with=tests/nbval_sanitize.cfg notebooks

test-code:
	$(PY) -m pytest --numprocesses=2 --dist=loadfile

lab: $(INSTALLED)
	$(PY) -m jupyterlab notebooks

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m qwen3_trainium.notebook_format --check notebooks
	$(PY) -m qwen3_trainium.source_rules src/qwen3_trainium configs bench

bench: $(INSTALLED)
	@status=0; for script in bench/*.py; do \
		echo "== $$script"; $(PY) "$$script" || status=1; \
	done; exit $$status

dry-run: $(INSTALLED)
	$(PY) -m qwen3_trainium dry-run

outputs: $(INSTALLED)
	$(PY) -m qwen3_trainium run --profile cpu --overwrite
	$(PY) -m qwen3_trainium.notebook_format --save out/cpu notebooks

ifeq ($(NEURON),1)
# Every package that is already there becomes a constraint at its own version: pip then adds what is
# missing, or stops with the conflict, but cannot replace torch, torch-neuronx, nki or torchtitan.
$(INSTALLED): pyproject.toml
	@python -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch_neuronx", "torchtitan"))))' \
		|| { echo "torch_neuronx or torchtitan is missing from the active environment: activate the AMI's, or make one with 'conda env create -f environment.yml'" >&2; exit 1; }
	python -m pip list --format=freeze --exclude qwen3-trainium > $@.constraints
	python -m pip install --constraint $@.constraints -e '.[notebooks,dev]'
	touch $@
else
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed and $(PYTHON) is not: install one and say 'make PYTHON=python3.12 …'" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -e '.[cpu,notebooks,dev]'
	touch $@
endif
