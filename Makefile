# Two commands matter: `make train` and `make test`. Each makes .venv, compiles and installs the package, and does its job.
#
#   PYTHON=python3.12          which Python makes .venv
#   TORCH=2.15.0               another torch than the one in constraints.txt
#   TORCH_INDEX=<address>      where torch comes from (a CPU-only or another CUDA build); everything else stays as it is
#   ARGS="--stages 4"          passed on to the command that the target runs
#   ROOM=optim                 of `make check` and `make test`: the tests of one folder of the package only
#   SPECTRAIN_CUDA=0|1         0 skips the CUDA half, 1 insists on it
#   GPU_PYTHON=python3.12      of the machine that `make gpu-wheel` builds for
#   SPECTRAIN_ARCHS=native|major|all, TORCH_CUDA_ARCH_LIST="9.0"   for which GPUs

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
TORCH_INDEX ?=
ARGS ?=
ROOM ?=
# of pytest, each a process with a torch of its own; ARGS="-n 0" for one process, which --pdb needs. One more than cores,
# as tests of processes wait more than they compute.
WORKERS ?= --dist worksteal -n $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n + 1 : 5)))

BIN := $(VENV)/bin
# The script, not `python -m pip`: that would see spectrain_ext.egg-info in this directory as an installed package.
PIP := $(BIN)/pip --disable-pip-version-check
INSTALL := $(PIP) install -c $(VENV)/constraints.txt
CXX_SUFFIXES := -name '*.cpp' -o -name '*.cc' -o -name '*.h' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh'

PACKAGE_SOURCES := setup.py CMakeLists.txt pyproject.toml \
	$(sort $(shell find spectrain_ext csrc cmake -type f \( -name '*.py' -o -name '*.pyi' -o -name 'py.typed' \
	-o -name '*.txt' -o -name '*.cmake' -o -name '*.in' -o $(CXX_SUFFIXES) \) 2>/dev/null))
CXX_SOURCES := $(sort $(shell find csrc tests bench -type f \( $(CXX_SUFFIXES) \) 2>/dev/null))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# two pips must not write to one environment at the same time
.NOTPARALLEL:
.PHONY: help install train check test lint docs report pytest bench nightly doctor gpu-wheel clean FORCE

help:
	@echo "make train    train a pipeline with every method and compare (ARGS=\"--help\" lists the options)"
	@echo "make check    the tests that start no processes and no compiler, for while you work; ROOM=optim: of one folder"
	@echo "make test     lint, types, documentation, all tests that guard a release"
	@echo "make docs     the documentation as a site, in build/docs; a warning is an error"
	@echo "make report   every figure, table and drawn picture in the documents, from the committed runs"
	@echo "make bench    by pytest-benchmark: every operator against its rivals, the pipeline's own cost (ARGS=\"--help\")"
	@echo "make doctor   what was built, what this machine has, what is missing"
	@echo "make nightly  all tests, those that take minutes too, with many more random cases"
	@echo "make gpu-wheel  what bench/gpu_suite.py takes along to a machine with a GPU and no network, in build/gpu"
	@echo "make lint     ruff, mypy, clang-format"
	@echo "make clean    remove .venv and everything that was built"

install: $(VENV)/.package
train: $(VENV)/.studies
	$(BIN)/python -m studies train $(ARGS)

doctor: $(VENV)/.package
	$(BIN)/spectrain doctor $(ARGS)

test: lint docs pytest

# What is generated from the code is generated from the installed package.
docs: $(VENV)/.extra-docs
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

# From inside bench/, for the package that was installed.
report: $(VENV)/.extra-bench
	cd bench && $(abspath $(BIN))/python -m report $(ARGS)

lint: $(VENV)/.extra-lint $(VENV)/.package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict spectrain_ext studies
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES))

# From inside tests/, so that neither pytest nor a process it starts can import the source tree instead of what was
# installed; test_project.py checks that it is so.
# pytest-benchmark would only warn that it does nothing under pytest-xdist.
PYTEST := cd tests && SPECTRAIN_TEST_INSTALLED=1 $(abspath $(BIN))/pytest -p no:benchmark $(WORKERS)

check: $(VENV)/.extra-test $(VENV)/.studies $(VENV)/.extra-examples
	$(PYTEST) -m 'not (nightly or processes or compiler)' $(ROOM) $(ARGS)

pytest: $(VENV)/.extra-test $(VENV)/.studies $(VENV)/.extra-examples
	$(PYTEST) --durations 25 $(ROOM) $(ARGS)

nightly: $(VENV)/.extra-test $(VENV)/.studies $(VENV)/.extra-examples
	SPECTRAIN_HYPOTHESIS_PROFILE=nightly; export SPECTRAIN_HYPOTHESIS_PROFILE; \
		$(PYTEST) -m 'nightly or not nightly' --timeout 3600 $(ARGS)

# ARGS="bench_operators.py --suite models": one file, with an option of its own. All figures are in build/bench.json.
bench: $(VENV)/.extra-bench
	@mkdir -p build
	cd bench && $(abspath $(BIN))/pytest --benchmark-json=$(abspath build)/bench.json --benchmark-sort=median \
		--benchmark-columns=median,iqr,min,rounds $(ARGS)

# --- for a machine with a GPU, where nothing can be downloaded and every minute is dear ---------------------------------

GPU_PYTHON ?= $(shell for p in python3.12 $$HOME/.pyenv/versions/3.12*/bin/python3.12 python3.12; do \
	$$p -c pass 2> /dev/null && break; done; echo $$p)
GPU_TOOLS := build/gpu-tools

# The package's wheel for that Python, for Hopper alone; the probe of launch policies; and what tests need. The wheel takes
# that Python's headers: where they are missing, the suite compiles on that machine.
gpu-wheel:
	@mkdir -p build/gpu
	@rm -rf build/lib build/lib.* build/gpu/*
	@if $(GPU_PYTHON) -c 'import os, sysconfig as s; assert os.path.exists(s.get_path("include") + "/Python.h")' 2>/dev/null; \
	then $(MAKE) --no-print-directory build/gpu/package; \
	else echo "$(GPU_PYTHON) or its headers are missing: no wheel; bench/gpu_suite.py will compile, for a minute or two"; fi
	PATH="$$PATH:$(or $(CUDA_HOME),/usr/local/cuda)/bin" PYTHONPATH=bench $(PYTHON) -m gpu.probe
	@PYTHONPATH=bench $(PYTHON) -m gpu.carried > build/gpu/sources
	$(PYTHON) -m pip --disable-pip-version-check --quiet download --only-binary=:all: --python-version 3.12 \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest build/gpu $(GPU_NEEDS) \
		|| echo "the tests' packages could not be downloaded: the machine has to have them"
	@du -sh build/gpu

# Within the bounds of pyproject.toml.
GPU_NEEDS := 'pytest>=8.2,<10' 'pytest-timeout>=2.3,<3' 'hypothesis>=6.100,<7' 'click>=8.1,<9' 'rich>=13.7,<16' 'safetensors>=0.5,<1'

.PHONY: build/gpu/package
build/gpu/package: $(GPU_TOOLS)/.made
	PATH="$(abspath $(GPU_TOOLS))/bin:$(or $(CUDA_HOME),/usr/local/cuda)/bin:$$PATH" SPECTRAIN_CUDA=1 SPECTRAIN_ARCHS= \
		TORCH_CUDA_ARCH_LIST=9.0 $(GPU_TOOLS)/bin/pip --disable-pip-version-check wheel --quiet --no-deps \
		--no-build-isolation --wheel-dir build/gpu .

$(GPU_TOOLS)/.made: pyproject.toml
	$(GPU_PYTHON) -m venv $(GPU_TOOLS)
	$(GPU_TOOLS)/bin/pip --disable-pip-version-check install --quiet \
		$$(grep '^requires = ' pyproject.toml | grep -o '"[^"]*"' | tr -d '"')
	@touch $@

# --- the environment: each step leaves a stamp, so that a second call does nothing -----------------------------------

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# TORCH and TORCH_INDEX stay chosen until others are. A torch of the right version but another index is replaced as well,
# so it has to go first.
$(VENV)/constraints.txt: constraints.txt $(VENV)/.made $(if $(TORCH)$(TORCH_INDEX),FORCE)
	@{ echo "# torch from $(or $(TORCH_INDEX),the default index)"; \
		sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' constraints.txt; } > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else \
		[ ! -e $(VENV)/.torch ] || $(PIP) --quiet uninstall -y torch; mv $@.new $@; fi

# torch first and pinned: what is installed later finds it satisfied and cannot pull another one in.
$(VENV)/.torch: $(VENV)/constraints.txt
	$(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

# What pyproject.toml says a build requires, here to stay: with the isolated environments of pip the tools had another
# path in every build, and everything was compiled again.
$(VENV)/.build-tools: $(VENV)/constraints.txt pyproject.toml
	$(INSTALL) --quiet $$(grep '^requires = ' pyproject.toml | grep -o '"[^"]*"' | tr -d '"')
	@touch $@

# The list of sources is a dependency of its own: a deleted file leaves no newer one behind.
$(VENV)/.sources: $(VENV)/.made FORCE
	@printf '%s\n' $(PACKAGE_SOURCES) "SPECTRAIN_CUDA=$(SPECTRAIN_CUDA)" "SPECTRAIN_ARCHS=$(SPECTRAIN_ARCHS)" \
		"ARCH=$(TORCH_CUDA_ARCH_LIST)" "CUDA_HOME=$(CUDA_HOME)" > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# build/lib would carry files that were deleted since into the wheel. The objects stay: only what changed is compiled.
$(VENV)/.package: $(VENV)/.torch $(VENV)/.build-tools $(VENV)/.sources $(PACKAGE_SOURCES) README.md LICENSE
	@rm -rf build/lib build/lib.*
	@echo 'compiling and installing spectrain_ext: two minutes on two cores with a CUDA compiler, one without'
	PATH="$(abspath $(BIN)):$$PATH" $(INSTALL) --quiet --no-build-isolation .
	@$(BIN)/spectrain doctor --brief
	@touch $@

$(VENV)/.extra-%: $(VENV)/.package pyproject.toml $(VENV)/constraints.txt
	$(INSTALL) --quiet 'spectrain_ext[$*]'
	@touch $@

$(VENV)/.studies: $(VENV)/.package studies/requirements.txt $(VENV)/constraints.txt
	$(INSTALL) --quiet -r studies/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks .hypothesis
	rm -rf tests/.hypothesis bench/.benchmarks
	find spectrain_ext tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
