# make demo       a rollout whose memory is many times its DRAM pool; report in demo/report.html
# make test       the test suite but for the slow tests        make test-slow   the slow ones
# make lint       ruff and mypy                                make format      apply ruff's format
# make fuzz       every parser for SECONDS (60) each, or TARGET alone
# make bench      benchmarks, each beside what it compares to  make clean       remove what make made
# make bench-kernels  the codecs against copying and plain torch: docs/performance.md's table
#
# Each target makes .venv if it is missing and installs the package into it. PYTHON chooses the
# interpreter, ARGS adds options to demo, test, test-slow and bench.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

.PHONY: demo test test-slow fuzz lint format bench bench-kernels clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/worldpager rollout --chunks 1200 --path loop --dram 720KiB --chunk-time 50ms --out demo $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow $(ARGS)

SECONDS ?= 60
TARGET  ?= block record tail document store memory name path run machine prediction

fuzz: $(VENV)/.installed-dev
	@$(PIP_INSTALL) -e '.[fuzz]'
	for target in $(TARGET); do $(BIN)/python -m tests.fuzz.run $$target $(SECONDS) || exit 1; done

bench: $(VENV)/.installed-dev
	$(BIN)/python -m pytest benchmarks --benchmark-only $(ARGS)

bench-kernels: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/kernels.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks .fuzz
	find worldpager tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Without an NVIDIA GPU, PyTorch's own index is asked for wheels that leave CUDA's gigabytes out;
# where it does not answer in three seconds, pip looks where it always does.
CPU_WHEELS := https://download.pytorch.org/whl/cpu
PIP_INSTALL = index= ; \
	if ! command -v nvidia-smi >/dev/null 2>&1 && $(BIN)/python -c "import signal, urllib.request as r; \
	signal.alarm(3); r.urlopen('$(CPU_WHEELS)/torch/')" >/dev/null 2>&1; \
	then index="--extra-index-url $(CPU_WHEELS)"; fi; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$index -c constraints.txt

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
		echo "make: no '$(PYTHON)' found; install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1), but 3.11 or newer is needed; name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "make: '$(PYTHON) -m venv' failed; on Debian and Ubuntu install the package python3-venv" >&2; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (the first time takes a few minutes)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) with the development tools (the first time takes a few minutes)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $@
