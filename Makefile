# Every target makes .venv itself and installs what it needs from pyproject.toml, again whenever pyproject.toml changes.
# PYTHON chooses the interpreter of a new .venv: make test PYTHON=python3.12

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
DEMO_STAMP := $(VENV)/.stamp-demo
DEV_STAMP := $(VENV)/.stamp-dev
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar off
# Two processes of one thread each: most tests are small, and threads of both would fight over the cores.
PYTEST_JOBS ?= 2
# The modules of benchmarks/ that can be run: benchmarks.int8_linear and the like.
BENCHMARKS = $(subst /,.,$(basename $(shell grep -l '__name__ == "__main__"' benchmarks/*.py)))

# make test-nightly has a .venv of its own, with the newest pre-releases that this index and pip's own have.
NIGHTLY_VENV := .venv-nightly
NIGHTLY_INDEX ?= https://download.pytorch.org/whl/nightly/cpu
NIGHTLY_PIP := $(NIGHTLY_VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off

# make test-oldest too, with the oldest versions of pyproject.toml; NumPy's is the newest that interprets Triton 3.6.
OLDEST_VENV := .venv-oldest
OLDEST_PIP := $(OLDEST_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --progress-bar off
OLDEST := 'torch==2.11.*' 'torchao==0.17.*' 'triton==3.6.*' 'transformers==5.0.*' 'accelerate==1.2.*' 'diffusers==0.39.*' 'timm==1.0.20' \
	'torchvision==0.26.*' 'numpy<2.4'
# What differs between versions: private names, captured graphs, exported models, and loading with transformers.
OLDEST_TESTS := tests/compat tests/conversion/test_in_place.py tests/conversion/test_layers_in_float.py \
	tests/conversion/test_linear_gradients.py \
	tests/integrations/test_transformers_loading.py \
	tests/backend/test_compile.py tests/backend/test_lower_linear.py tests/graph/test_inline_grad_scopes.py \
	tests/graph/test_causal_masks.py tests/graph/test_cast_late.py tests/graph/test_expand_products.py \
	tests/graph/test_read_after_writes.py tests/graph/test_upcast_attention.py \
	tests/training/test_block_tensor_compiled.py tests/training/test_graph_breaks_in_blocks.py \
	tests/training/test_with_torch.py::test_compiled_by_inductor_under_autocast tests/kernels/runtime

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all test-costs test-nightly test-oldest check format test-gpu test-gpu-part bench-smoke docs dist clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Its layers are small: threads that spin while they wait take most of the time beside other processes.
demo: $(DEMO_STAMP)  ## train, quantize, compile and compare a vision transformer on handwritten digits
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/digits_demo.py

# The last digit of the commit's id chooses the turn, so that the commits of some days run all tests; 0 without git.
TURN ?= $(or $(shell git rev-parse --verify --quiet HEAD 2>/dev/null | tail -c 2),0)
TAKING_TURNS := -p tests.turns --turn $(TURN)

test: SELECTION = $(TAKING_TURNS)
test: run-tests  ## tests that need no GPU, also interpreted Triton kernels and CPUs without VNNI; long ones take turns, TURN=0 to f

test-all: run-tests  ## the same without turns: every case of every test that needs no GPU

# Tests read the file that is there: the new one replaces it at the end, if they pass.
NEW_COSTS := $(VENV)/costs.json
test-costs:  ## the same, and write what long tests take, which decides about their turns
	rm -f $(NEW_COSTS)
	@$(MAKE) run-tests SELECTION="-p tests.turns --record-costs $(NEW_COSTS)"
	mv $(NEW_COSTS) tests/costs.json

# As on an x86 processor with AVX2 alone. Inductor's cache does not know these variables: sharing it gives wrong code.
WITHOUT_VNNI := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/$(VENV)/inductor-avx2

.PHONY: run-tests
run-tests: $(DEV_STAMP)
	@status=0; \
	echo "== tests =="; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_JOBS) --dist worksteal \
		$(SELECTION) -m "not gpu and not interpreter" || status=1; \
	echo "== Triton kernels, interpreted =="; \
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_JOBS) --dist worksteal \
		$(SELECTION) -m "not gpu and interpreter" tests/kernels || status=1; \
	echo "== CPU operators without VNNI =="; \
	$(WITHOUT_VNNI) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_JOBS) --dist worksteal \
		$(SELECTION) -m "not gpu and not interpreter" tests/kernels/linear tests/kernels/test_quantize.py || status=1; \
	exit $$status

# Only the first installation takes pre-releases. The stamps tell the second make that this .venv is complete.
test-nightly:  ## the newest pre-releases of PyTorch and Triton: every private name first, then make test-all
	$(MAKE) VENV=$(NIGHTLY_VENV) $(NIGHTLY_VENV)/.stamp-venv
	$(NIGHTLY_PIP) --pre --upgrade --extra-index-url $(NIGHTLY_INDEX) torch torchao torchvision triton
	$(NIGHTLY_PIP) --extra-index-url $(NIGHTLY_INDEX) --editable '.[test,bench]'
	touch $(NIGHTLY_VENV)/.stamp-demo $(NIGHTLY_VENV)/.stamp-dev
	$(NIGHTLY_VENV)/bin/python -m pip list --disable-pip-version-check
	OMP_NUM_THREADS=1 $(NIGHTLY_VENV)/bin/python -m pytest -n $(PYTEST_JOBS) tests/compat
	$(MAKE) VENV=$(NIGHTLY_VENV) test-all

test-oldest: $(OLDEST_VENV)/.stamp-oldest  ## tests with the oldest supported PyTorch, Triton, torchao and transformers; long ones take turns
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest -n $(PYTEST_JOBS) --dist worksteal \
		$(TAKING_TURNS) -m "not gpu and not interpreter" $(OLDEST_TESTS)

$(OLDEST_VENV)/.stamp-oldest: pyproject.toml Makefile
	$(MAKE) VENV=$(OLDEST_VENV) $(OLDEST_VENV)/.stamp-venv
	$(OLDEST_PIP) $(OLDEST) --editable '.[vision,transformers,diffusers]' 'pytest>=9' pytest-xdist hypothesis expecttest
	@touch $@

check: $(DEV_STAMP)  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-gpu: $(DEV_STAMP)  ## all tests on a machine with a GPU; a skipped test is a failure
	$(BIN)/python -m pytest --require-gpu

# Of one machine for some minutes: benchmarks/results/native/ has what passed before, and a new file says what is missing.
GPU_JOBS ?= 16
GPU_SECONDS ?= 480
GPU_RECORD ?= build/gpu-tests.json
test-gpu-part: $(DEV_STAMP)  ## as many tests of a GPU as GPU_SECONDS allow, those never passed there first; GPU_RECORD says which
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.time_budget --require-gpu -m "gpu or interpreter" \
		-n $(GPU_JOBS) --dist load --maxschedchunk 4 -o faulthandler_timeout=150 \
		--total-limit $(GPU_SECONDS) --known 'benchmarks/results/native/*.json' --record $(GPU_RECORD)

bench-smoke: $(DEV_STAMP)  ## every benchmark once, on tiny shapes
	@set -e; for benchmark in $(BENCHMARKS); do \
		echo "== $$benchmark =="; \
		$(BIN)/python -m $$benchmark --smoke; \
	done

docs: $(DEV_STAMP)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: $(DEV_STAMP)  ## build the sdist, and the wheel from it, into dist/
	rm -rf build/lib build/bdist.* dist  # not build/: the demo keeps its checkpoint there
	$(BIN)/python -m build

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) $(NIGHTLY_VENV) $(OLDEST_VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-venv:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "qframework needs Python 3.11 or newer, and $(if $(PYTHON),$(PYTHON) is not one,none is on the PATH)." >&2; \
		echo "Install one and name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(DEMO_STAMP): pyproject.toml | $(VENV)/.stamp-venv
	@echo "installing qframework and what the demo needs into $(VENV) (a minute or two the first time)"
	$(PIP_INSTALL) --editable '.[vision]'
	@touch $@

$(DEV_STAMP): pyproject.toml | $(VENV)/.stamp-venv
	@echo "installing qframework and its development tools into $(VENV) (a minute or two the first time)"
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $(DEMO_STAMP) $@
