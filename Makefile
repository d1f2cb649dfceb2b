# Everything runs in one virtual environment, .venv, which the first target that needs it creates.
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
ALL_STAMP := $(VENV)/.installed-all
HOROVOD_STAMP := $(VENV)/.installed-horovod
DOCS_STAMP := $(VENV)/.installed-docs

# The first interpreter that starts and is supported; or say `make PYTHON=/path/to/python`.
SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
first_supported = $(shell for candidate in $(1); do \
	if $$candidate -c '$(SUPPORTED)' 2>/dev/null; then echo $$candidate; break; fi; done)
PYTHON ?= $(call first_supported,python3 python3.13 python3.12 python3.11 python3.10)

# The lowest versions that are supported have an environment of their own, with the lowest Python that starts.
LOWEST ?= .venv-lowest
LOWEST_PY := $(LOWEST)/bin/python
LOWEST_STAMP := $(LOWEST)/.installed
LOWEST_PYTHON ?= $(call first_supported,python3.10 python3.11 python3.12)

# So do the newest versions that the package index has, whatever `constraints-dev.txt` says.
NEWEST ?= .venv-newest
NEWEST_PY := $(NEWEST)/bin/python
NEWEST_STAMP := $(NEWEST)/.installed
NEWEST_PYTHON ?= $(call first_supported,python3.13 python3.12 python3.11)

# A machine with GPUs brings its own PyTorch. A part of the tests for GPUs, and the interpreter that runs it.
PART ?= 1
GPU_PY ?= python3

# A peer of the benchmarks that needs other versions than the tests do.
TORCHFT := .venv-torchft
TORCHFT_STAMP := $(TORCHFT)/.installed

# Examples of what needs more than these: Ray Data 2.55, Horovod, a later exporter to ONNX.
NEWER := (ray_data or horovod or export_model)

# One thread for each process: the tests and the demo run several processes, often more than there are cores.
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

# The tests start thousands of processes. Where this is set, each of them compiles what it imports of raysgd again, which
# takes as long as all else that a worker imports: `docs/adr/0064`. `make clean` removes what is written.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: demo quick unit test test-all test-as-shipped test-times test-lowest test-newest soak leaves lint typecheck format bench gpu claims docs site lock clean help

# `make quick` runs what needs no processes and no seconds; `make test` adds the real test of each promise of the README;
# `make test-all` adds the rest. No test runs twice.
QUICK := not (integration or program or long or soak or gpu)
FIRST := (promise or not (integration or program or long)) and not (soak or gpu)
REST := (integration or program or long) and not (promise or soak or gpu)

# Checks of the repository itself and of what the tests are made of, which `make lint` runs.
CHECKS := tests/repository tests/helpers
TESTS := tests $(CHECKS:%=--ignore=%)

# Three at once on two cores, because many tests wait for processes to start, to end or to be missed. What other
# libraries warn of is left to `make quick`: here it would stand between you and what failed.
RUN = $(PY) -m tests.run $(TESTS) -q --numprocesses 3 --dist loadfile --no-loadscope-reorder --disable-warnings

# What all tests but a few need.
EXTRAS := data,hf,lightning,metrics,migrate,plot,progress,storage,tensorboard,tf,torch,tune

demo: $(DEMO_STAMP) ## train a classifier of real digits on two workers, save, load and test it
	$(PY) examples/proofs/quickstart.py

test: $(STAMP) ## run the unit tests, and with real workers what the README promises: some minutes
	$(RUN) -m "$(FIRST)"

test-all: test $(ALL_STAMP) $(HOROVOD_STAMP) ## run all tests but the soak tests; builds Horovod
	$(RUN) -m "$(REST)"

# Other tests fork their workers from a process that has imported PyTorch, and let survivors wait longer for a slow machine.
test-as-shipped: $(ALL_STAMP) ## run the tests of the promises with workers that Ray starts, and the time limits that users have
	RAYSGD_FORKED_WORKERS=0 RAYSGD_AS_SHIPPED=1 $(PY) -m tests.run $(TESTS) -q --numprocesses 2 --dist loadfile --no-loadscope-reorder \
		--disable-warnings -m "promise and not (soak or gpu)"

test-times: $(ALL_STAMP) $(HOROVOD_STAMP) ## write tests/seconds.json, by which the tests are put in order
	$(RUN) -m "not (soak or gpu)" --write-seconds

# All at once: the tests do not keep two cores busy all the time, and most of the style is checked while they start.
quick: $(STAMP) ## style, types and the unit tests: between two edits
	$(MAKE) --no-print-directory --jobs 3 lint typecheck unit

unit: $(STAMP) ## the tests of `make quick`
	$(PY) -m pytest $(TESTS) -q -m "$(QUICK)" --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-lowest: $(LOWEST_STAMP) ## run the tests of `make quick`, and the examples on Ray, with the lowest supported versions
	$(LOWEST_PY) -m raysgd doctor
	$(LOWEST_PY) -m pytest $(TESTS) -q -m "$(QUICK)" --numprocesses 2 --dist loadfile --no-loadscope-reorder
	RAYSGD_FORKED_WORKERS=0 $(LOWEST_PY) -m pytest tests/examples -q -m soak -k "as_a_program_on_workers and not $(NEWER)"

test-newest: $(NEWEST_STAMP) ## run the tests of `make quick`, and the examples on Ray, with the newest versions
	$(NEWEST_PY) -m raysgd doctor
	$(NEWEST_PY) -m pytest $(TESTS) -q -m "$(QUICK)" --numprocesses 2 --dist loadfile --no-loadscope-reorder
	RAYSGD_FORKED_WORKERS=0 $(NEWEST_PY) -m pytest tests/examples -q -m soak -k "as_a_program_on_workers and not horovod"

soak: $(ALL_STAMP) $(HOROVOD_STAMP) ## run the long tests, which repeat failures for minutes to hours
	RAYSGD_FORKED_WORKERS=0 $(PY) -m pytest tests -q -m soak --timeout=7200 -o faulthandler_timeout=8000

leaves: $(ALL_STAMP) ## take one leaf of the library away at a time, and run the unit tests of the rest: an hour or two
	$(PY) -m tests.leaves

lint: $(STAMP) ## check style, format, spelling, and the rules of the repository
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/codespell
	$(PY) -m pytest $(CHECKS) -q

typecheck: $(STAMP) ## check types, and that editors see those of users' programs
	$(PY) -m mypy
	$(PY) -m pyright --pythonpath $(PY) --warnings tests/typed_use.py

format: $(STAMP) ## format the code and apply safe fixes
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(STAMP) $(TORCHFT_STAMP) ## run the benchmarks against the libraries they compare with
	set -e; for script in examples/benchmarks/[!_]*.py; do $(PY) $$script; done

gpu: ## on a machine with GPUs: run a PART of the cases of tests/gpu (1 to 5), at most four minutes, and write gpu-part-N.json
	$(GPU_PY) -m tests.gpu.run --part $(PART) --json gpu-part-$(PART).json

claims: $(STAMP) ## show what of the README and the comparison holds here, as far as it takes less than a minute for each sentence
	$(PY) -m tests.repository.claims

docs: $(ALL_STAMP) $(DOCS_STAMP) ## run the Python of all pages, then build the site
	$(PY) -m pytest tests/docs -q --numprocesses 2
	$(MAKE) site

site: $(DOCS_STAMP) ## build the site into site/; fails on a broken link, a page in no menu, a public name without a docstring
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

lock: $(STAMP) ## write constraints-*.txt again from pyproject.toml; UPGRADE=1 chooses all versions of -dev again
	$(PY) .ci/lock.py $(if $(UPGRADE),--upgrade)
	$(VENV)/bin/uv pip compile pyproject.toml --quiet --all-extras --group dev --group full --resolution lowest-direct \
		--python-version 3.10 --no-annotate --custom-compile-command "make lock" --upgrade \
		--output-file constraints-lowest.txt

clean: ## remove build results and caches, but not the environment
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find raysgd operators examples tests -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# PyTorch goes first and pinned: left to a range, pip may fetch builds with gigabytes of libraries for GPUs.
$(DEMO_STAMP): pyproject.toml setup.py constraints-dev.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.10 to 3.13 found: install one, or set PYTHON=..." >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --upgrade "pip>=25.1"
	$(PY) -m pip install $(shell grep '^torch==' constraints-dev.txt)
	$(PY) -m pip install -c constraints-dev.txt -e ".[torch,progress]" scikit-learn
	touch $@

$(STAMP): $(DEMO_STAMP)
	$(PY) -m pip install -c constraints-dev.txt --group dev -e ".[$(EXTRAS)]"
	touch $@

# torchvision gets a folder of its own: `tests/helpers/vision.py` says why.
$(ALL_STAMP): $(STAMP)
	$(PY) -m pip install -c constraints-dev.txt --group full -e ".[all]"
	$(PY) -m pip install -c constraints-dev.txt --no-deps --upgrade --target $(VENV)/vision torchvision
	touch $@

# Horovod is built from source for the PyTorch above: some minutes, but once for each user, who has a cache of wheels.
# It does not build with Python 3.13, where the tests go without it.
$(HOROVOD_STAMP): $(ALL_STAMP) $(wildcard raysgd/horovod/*.py)
	$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 13))' || $(PY) -m raysgd.horovod.install
	touch $@

$(LOWEST_STAMP): pyproject.toml setup.py constraints-lowest.txt
	@test -n "$(LOWEST_PYTHON)" || { echo "no Python 3.10 to 3.12 found: install one, or set LOWEST_PYTHON=..." >&2; exit 1; }
	test -x $(LOWEST_PY) || $(LOWEST_PYTHON) -m venv $(LOWEST)
	$(LOWEST_PY) -m pip install --upgrade "pip>=25.1"
	$(LOWEST_PY) -m pip install -c constraints-lowest.txt --group dev --group full
	$(LOWEST_PY) -m pip install -c constraints-lowest.txt --no-build-isolation -e ".[all,vision]"
	$(LOWEST_PY) -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || $(LOWEST_PY) -m raysgd.horovod.install
	touch $@

$(NEWEST_STAMP): pyproject.toml setup.py
	@test -n "$(NEWEST_PYTHON)" || { echo "no Python 3.11 to 3.13 found: install one, or set NEWEST_PYTHON=..." >&2; exit 1; }
	test -x $(NEWEST_PY) || $(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST_PY) -m pip install --upgrade "pip>=25.1"
	$(NEWEST_PY) -m pip install --upgrade --group dev --group full -e ".[$(EXTRAS),vision]"
	touch $@

# Its workers also import the models and data of the benchmarks, and so raysgd.
$(TORCHFT_STAMP): pyproject.toml setup.py constraints-dev.txt
	$(PYTHON) -m venv $(TORCHFT)
	$(TORCHFT)/bin/python -m pip install $(shell grep '^torch==' constraints-dev.txt)
	$(TORCHFT)/bin/python -m pip install torchft==0.2.0 -e .
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(PY) -m pip install -c constraints-dev.txt --group docs
	touch $@
