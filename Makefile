# Two commands matter: `make train` and `make test`. Each makes .venv, compiles and installs the package, and does its job.
#
#   PYTHON=python3.12          which Python makes .venv
#   TORCH_INDEX=<address>      where torch comes from (a CPU-only or another CUDA build); everything else stays as it is
#   ARGS="--stages 4"          passed on to the command that the target runs
#   SPECTRAIN_CUDA=0|1         0 skips the CUDA half, 1 insists on it; TORCH_CUDA_ARCH_LIST="9.0" narrows it

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=
# of pytest, each a process with a torch of its own; ARGS="-n 0" for one process, which --pdb needs. One more than cores
# was no faster (14 min 38 s instead of 12 min 52 s on two cores, other work beside the former).
WORKERS ?= -n auto --maxprocesses 4

BIN := $(VENV)/bin
# The script, not `python -m pip`: that would see spectrain_ext.egg-info in this directory as an installed package.
PIP := $(BIN)/pip --disable-pip-version-check
CXX_SUFFIXES := -name '*.cpp' -o -name '*.cc' -o -name '*.h' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh'

PACKAGE_SOURCES := setup.py CMakeLists.txt pyproject.toml \
	$(sort $(shell find spectrain_ext csrc -type f \( -name '*.py' -o -name '*.pyi' -o -name 'py.typed' \
	-o -name '*.txt' -o -name '*.cmake' -o -name '*.in' -o $(CXX_SUFFIXES) \) 2>/dev/null))
CXX_SOURCES := $(sort $(shell find csrc tests -type f \( $(CXX_SUFFIXES) \) 2>/dev/null))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# two pips must not write to one environment at the same time
.NOTPARALLEL:
.PHONY: help install train test lint pytest bench bench-host nightly doctor clean FORCE

help:
	@echo "make train    train a pipeline with every method and compare (ARGS=\"--help\" lists the options)"
	@echo "make test     lint, types, tests"
	@echo "make bench    every operator against its rivals (ARGS=\"--help\" lists the options), the pipeline's own cost"
	@echo "make doctor   what was built, what this machine has, what is missing"
	@echo "make nightly  all tests, those that take minutes too, with many more random cases"
	@echo "make lint     ruff, mypy, clang-format"
	@echo "make clean    remove .venv and everything that was built"

install: $(VENV)/.package
train: $(VENV)/.extra-train
	$(BIN)/spectrain train $(ARGS)

doctor: $(VENV)/.package
	$(BIN)/spectrain doctor $(ARGS)

test: lint pytest

lint: $(VENV)/.extra-lint $(VENV)/.package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict spectrain_ext
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES))

# From inside tests/, so that neither pytest nor a process it starts can import the source tree instead of what was
# installed; test_project.py checks that it is so.
pytest: $(VENV)/.extra-test $(VENV)/.extra-train
	cd tests && SPECTRAIN_TEST_INSTALLED=1 $(abspath $(BIN))/pytest $(WORKERS) $(ARGS)

nightly: $(VENV)/.extra-test $(VENV)/.extra-train
	cd tests && SPECTRAIN_TEST_INSTALLED=1 SPECTRAIN_HYPOTHESIS_PROFILE=nightly \
		$(abspath $(BIN))/pytest $(WORKERS) -m 'nightly or not nightly' --timeout 3600 $(ARGS)

bench: $(VENV)/.extra-bench
	$(BIN)/spectrain bench $(ARGS)
	$(MAKE) bench-host ARGS=

bench-host: $(VENV)/.extra-bench
	cd bench && $(abspath $(BIN))/pytest $(ARGS)

# --- the environment: each step leaves a stamp, so that a second call does nothing -----------------------------------

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and pinned: what is installed later finds it satisfied and cannot pull another one in.
$(VENV)/.torch: $(VENV)/.made $(VENV)/.torch-index constraints.txt
	$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

# Another TORCH_INDEX than last time: the installed torch has the right version already, so it has to go first.
$(VENV)/.torch-index: $(VENV)/.made $(if $(TORCH_INDEX),FORCE)
	@if [ "$$(cat $@ 2>/dev/null)" != "$(TORCH_INDEX)" ]; then \
		[ ! -e $(VENV)/.torch ] || $(PIP) --quiet uninstall -y torch; \
		echo "$(TORCH_INDEX)" > $@; \
	elif [ ! -e $@ ]; then echo > $@; fi

# The list of sources is a dependency of its own: a deleted file leaves no newer one behind.
$(VENV)/.sources: $(VENV)/.made FORCE
	@printf '%s\n' $(PACKAGE_SOURCES) \
		"SPECTRAIN_CUDA=$(SPECTRAIN_CUDA)" "ARCH=$(TORCH_CUDA_ARCH_LIST)" "CUDA_HOME=$(CUDA_HOME)" > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# build/lib would carry files that were deleted since into the wheel, and CMake's cache names the ninja of the last
# build's isolated environment, which is gone. The objects stay: only what changed is compiled again.
$(VENV)/.package: $(VENV)/.torch $(VENV)/.sources $(PACKAGE_SOURCES) README.md LICENSE
	@rm -rf build/lib build/lib.* build/temp.*/cmake/CMakeCache.txt
	@echo 'compiling and installing spectrain_ext: some minutes with a CUDA compiler, less than one without'
	$(PIP) --quiet install -c constraints.txt .
	@$(BIN)/spectrain doctor --brief
	@touch $@

$(VENV)/.extra-%: $(VENV)/.package pyproject.toml constraints.txt
	$(PIP) --quiet install -c constraints.txt 'spectrain_ext[$*]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks .hypothesis
	rm -rf tests/.hypothesis bench/.benchmarks
	find spectrain_ext tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
