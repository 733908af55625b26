# The two main commands are `make train` and `make test`. Each makes .venv, compiles and installs the package, and does its job.
#
#   PYTHON=python3.12          which Python makes .venv
#   TORCH=2.15.0               a torch other than the one in constraints.txt
#   TORCH_INDEX=<address>      the index for torch only (a CPU-only or another CUDA build)
#   ARGS="--stages 4"          passed to the command that the target runs
#   ROOM=optim                 for `make check` and `make test`: only the tests of one folder of the package
#   SPECTRAIN_CUDA=0|1         0 skips the CUDA code, 1 requires it
#   GPU_PYTHON=python3.12      the Python of the machine that `make gpu-wheel` builds for
#   SPECTRAIN_ARCHS=native|major|all, TORCH_CUDA_ARCH_LIST="9.0"   the GPUs to build for

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
TORCH_INDEX ?=
ARGS ?=
ROOM ?=
# pytest's workers, each a process that imports torch; ARGS="-n 0" runs one process, as --pdb needs. One more than cores,
# because tests that start processes wait more than they compute.
WORKERS ?= --dist worksteal -n $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n + 1 : 5)))

BIN := $(VENV)/bin
# The script, because `python -m pip` takes spectrain_ext.egg-info in this directory for an installed package.
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
.PHONY: help install train check test lint spelling release docs report pytest bench nightly doctor gpu-wheel clean FORCE

help:
	@echo "make train    train a pipeline with every method and compare (ARGS=\"--help\" lists the options)"
	@echo "make check    the tests that start no processes and no compiler, while you work; ROOM=optim: of one folder"
	@echo "make test     lint, types, documentation and all tests but the nightly ones"
	@echo "make docs     spelling, and the documentation as a site, in build/docs; a warning is an error"
	@echo "make report   the tables and a picture in the documents, from the committed runs"
	@echo "make bench    every operator against its rivals, and the pipeline's own cost (ARGS=\"--help\")"
	@echo "make doctor   what was built, the devices, problems"
	@echo "make nightly  all tests, also those that take minutes, with many more random cases"
	@echo "make gpu-wheel  what bench/gpu_suite.py needs on a machine with a GPU and no network, in build/gpu"
	@echo "make lint     ruff, mypy, clang-format, spelling, the workflows of continuous integration"
	@echo "make release  the source distribution and this machine's wheel, checked, in dist"
	@echo "make clean    remove .venv and everything that was built"

install: $(VENV)/.package
train: $(VENV)/.studies
	$(BIN)/python -m studies train $(ARGS)

doctor: $(VENV)/.package
	$(BIN)/spectrain doctor $(ARGS)

# .all first, so that lint and docs find their tools installed.
test: $(VENV)/.all lint docs pytest

# The reference is generated from the installed package.
docs: $(VENV)/.extra-docs spelling
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

# From bench/, so that the installed package is imported.
report: $(VENV)/.extra-bench
	cd bench && $(abspath $(BIN))/python -m report $(ARGS)

lint: $(VENV)/.extra-lint spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict spectrain_ext studies tests/helpers/typed_program.py
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES))
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --offline --no-progress --quiet --persona pedantic .github

# Settings and words to ignore are in pyproject.toml.
spelling: $(VENV)/.extra-lint
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md Makefile CMakeLists.txt *.toml *.py .ci .github \
		bench cmake csrc docs examples spectrain_ext studies tests

# Uploads nothing; .github/workflows/release.yml publishes when a tag is pushed.
release: $(VENV)/.extra-test
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# From tests/, so that pytest and the processes that it starts import the installed package and not the source tree;
# test_project.py checks this. pytest-benchmark would only warn that it does nothing under pytest-xdist.
PYTEST := cd tests && SPECTRAIN_TEST_INSTALLED=1 $(abspath $(BIN))/pytest -p no:benchmark $(WORKERS)

check: $(VENV)/.all
	$(PYTEST) -m 'not (nightly or processes or compiler)' $(ROOM) $(ARGS)

pytest: $(VENV)/.all
	$(PYTEST) --durations 25 $(ROOM) $(ARGS)
	cd tests && $(abspath $(BIN))/python -m helpers.house

nightly: $(VENV)/.all
	SPECTRAIN_HYPOTHESIS_PROFILE=nightly; export SPECTRAIN_HYPOTHESIS_PROFILE; \
		$(PYTEST) -m 'nightly or not nightly' --timeout 3600 $(ARGS)

# ARGS="bench_operators.py --suite models" runs one file with an option. All figures are in build/bench.json.
bench: $(VENV)/.extra-bench
	@mkdir -p build
	cd bench && $(abspath $(BIN))/pytest --benchmark-json=$(abspath build)/bench.json --benchmark-sort=median \
		--benchmark-columns=median,iqr,min,rounds $(ARGS)

# --- for a machine with a GPU and without a network ----------------------------------------------------------------------

GPU_PYTHON ?= $(shell for p in python3.12 $$HOME/.pyenv/versions/3.12*/bin/python3.12 python3.12; do \
	$$p -c pass 2> /dev/null && break; done; echo $$p)
GPU_TOOLS := build/gpu-tools

# The package's wheel for that Python and for Hopper only, and the packages that tests need.
# The wheel needs that Python's headers; without them, the suite compiles on the machine with the GPU.
gpu-wheel:
	@mkdir -p build/gpu
	@rm -rf build/lib build/lib.* build/gpu/*
	@if $(GPU_PYTHON) -c 'import os, sysconfig as s; assert os.path.exists(s.get_path("include") + "/Python.h")' 2>/dev/null; \
	then $(MAKE) --no-print-directory build/gpu/package; \
	else echo "$(GPU_PYTHON) or its headers are missing: no wheel; bench/gpu_suite.py will compile, for a minute or two"; fi
	@$(MAKE) --no-print-directory build/gpu/on_gpu
	@PYTHONPATH=bench $(PYTHON) -m gpu.carried > build/gpu/sources
	$(PYTHON) -m pip --disable-pip-version-check --quiet download --only-binary=:all: --python-version 3.12 \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest build/gpu $(GPU_NEEDS) \
		|| echo "the tests' packages could not be downloaded: the machine has to have them"
	@du -sh build/gpu

# Within the ranges of pyproject.toml.
GPU_NEEDS := 'pytest>=8.2,<10' 'pytest-timeout>=2.3,<3' 'hypothesis>=6.100,<7' 'click>=8.1,<9' 'rich>=13.7,<16' 'safetensors>=0.5,<1'

# The program that runs every kernel, for Hopper only, see tests/ptx.
.PHONY: build/gpu/package build/gpu/on_gpu
build/gpu/on_gpu: $(GPU_TOOLS)/.made
	PATH="$(abspath $(GPU_TOOLS))/bin:$(or $(CUDA_HOME),/usr/local/cuda)/bin:$$PATH" sh -c 'cmake -S tests/ptx -B build/gpu-cases \
		-G Ninja -DSPECTRAIN_ARCH=90 -DSPECTRAIN_CODE=arch=compute_90,code=sm_90 && cmake --build build/gpu-cases --target on_gpu'
	cp build/gpu-cases/on_gpu $@

build/gpu/package: $(GPU_TOOLS)/.made
	PATH="$(abspath $(GPU_TOOLS))/bin:$(or $(CUDA_HOME),/usr/local/cuda)/bin:$$PATH" SPECTRAIN_CUDA=1 SPECTRAIN_ARCHS= \
		TORCH_CUDA_ARCH_LIST=9.0 $(GPU_TOOLS)/bin/pip --disable-pip-version-check wheel --quiet --no-deps \
		--no-build-isolation --wheel-dir build/gpu .

$(GPU_TOOLS)/.made: pyproject.toml
	$(GPU_PYTHON) -m venv $(GPU_TOOLS)
	$(GPU_TOOLS)/bin/pip --disable-pip-version-check install --quiet \
		$$(grep '^requires = ' pyproject.toml | grep -o '"[^"]*"' | tr -d '"')
	@touch $@

# --- the environment: each step writes a stamp, so that a second call does nothing -----------------------------------

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# TORCH and TORCH_INDEX stay in effect until you choose others. pip would keep a torch of the right version from another
# index, so it is uninstalled first.
$(VENV)/constraints.txt: constraints.txt $(VENV)/.made $(if $(TORCH)$(TORCH_INDEX),FORCE)
	@{ echo "# torch from $(or $(TORCH_INDEX),the default index)"; \
		sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' constraints.txt; } > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else \
		[ ! -e $(VENV)/.torch ] || $(PIP) --quiet uninstall -y torch; mv $@.new $@; fi

# torch comes first and is pinned, so that later packages do not install another one.
$(VENV)/.torch: $(VENV)/constraints.txt
	$(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

# The build requirements of pyproject.toml. In pip's isolated environments the tools have a new path in every build, and
# everything is compiled again.
$(VENV)/.build-tools: $(VENV)/constraints.txt pyproject.toml
	$(INSTALL) --quiet $$(grep '^requires = ' pyproject.toml | grep -o '"[^"]*"' | tr -d '"')
	@touch $@

# The list of sources is a dependency of its own, because a deleted file leaves no newer one behind.
$(VENV)/.sources: $(VENV)/.made FORCE
	@printf '%s\n' $(PACKAGE_SOURCES) "SPECTRAIN_CUDA=$(SPECTRAIN_CUDA)" "SPECTRAIN_ARCHS=$(SPECTRAIN_ARCHS)" \
		"ARCH=$(TORCH_CUDA_ARCH_LIST)" "CUDA_HOME=$(CUDA_HOME)" > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# build/lib would put deleted files into the wheel. The objects stay, so that only what changed is compiled. python -P imports
# what was installed, not this folder.
$(VENV)/.package: $(VENV)/.torch $(VENV)/.build-tools $(VENV)/.sources $(PACKAGE_SOURCES) README.md LICENSE
	@rm -rf build/lib build/lib.*
	@echo 'compiling and installing spectrain_ext: two minutes on two cores with a CUDA compiler, one without'
	PATH="$(abspath $(BIN)):$$PATH" $(INSTALL) --quiet --no-build-isolation '.[commands]'
	@$(BIN)/python -P -c 'from spectrain_ext import _C; print(_C.build_info())'
	@touch $@

# Everything that `make test` needs, by one call of pip instead of five.
$(VENV)/.all: $(VENV)/.package pyproject.toml studies/requirements.txt $(VENV)/constraints.txt
	$(INSTALL) --quiet 'spectrain_ext[lint,docs,test,examples]' -r studies/requirements.txt
	@touch $@ $(VENV)/.extra-lint $(VENV)/.extra-docs $(VENV)/.extra-test $(VENV)/.studies

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
