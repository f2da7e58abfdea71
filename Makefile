# Every target sets up what it needs in .venv; PYTHON names the interpreter to make it with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(if $(VENV),$(VENV)/.ready)
TEST_PYTHON := $(if $(VENV),$(BIN)/python,$(PYTHON))
WORKERS := auto
USER_READY := $(VENV)/.ready-user

.PHONY: demo demo-train demo-rows test test-browser test-slow test-portable lint docs bench wheel clean

# About a minute: a released softmax model and a released long reader look for a key far beyond their training length.
demo: $(USER_READY)
	$(BIN)/lssar demo

# Minutes: three small models trained at length 128 and evaluated at up to 16 times that.
demo-train: $(USER_READY)
	$(BIN)/lssar demo-train

# Seconds: attention rows on synthetic keys as the context grows 64 times.
demo-rows: $(USER_READY)
	$(BIN)/lssar rows

test: $(READY) lint
	LSSAR_REQUIRE_NATIVE=1 $(BIN)/python -m pytest -n $(WORKERS)

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and not gpu"

# The report and the attention explorer in headless Chromium, which is installed where apt-get can do it.
test-browser: $(READY)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[browser]'
	command -v chromium > /dev/null || apt-get install --yes --no-install-recommends chromium
	$(BIN)/python -m pytest -m browser tests/browser

# The numeric tests under other instruction sets and other seeds; SETTINGS="zen old" runs only some. With an interpreter
# that has all they need, and without installing anything: make test-portable VENV= PYTHON=python3 WORKERS=8 (after
# `python3 setup.py build_ext --inplace`, which compiles the C kernels).
test-portable: $(READY)
	$(TEST_PYTHON) -m tests.portable --workers $(WORKERS) $(if $(SETTINGS),--settings $(SETTINGS))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site in out/site; dead links are errors.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "the site is in out/site/index.html"

# The CPU numbers of the README.
bench: $(USER_READY)
	$(BIN)/lssar bench --contestants tiled:lssar tiled:lssa tiled:softmax tiled:cosine_softmax sdpa:softmax eager:lssar \
	  --lengths 1024 2048 4096 8192 --heads 4 --head-sizes 64 --out benchmarks/results/cpu-float32 --overwrite

# A wheel with the native kernels, and the sdist that it is built from, in dist.
wheel: $(USER_READY)
	$(BIN)/pip install --quiet build
	LSSAR_REQUIRE_NATIVE=1 $(BIN)/python -m build --outdir dist .
	@ls dist/*

# What using the library takes. torch comes first and alone: a plain request would bring a CUDA build of several
# gigabytes where a CPU one will do.
$(USER_READY): pyproject.toml constraints.txt setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); the first time this takes a few minutes"
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(shell grep -E '^torch==' constraints.txt)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[plots,report]'
	touch $@

# What developing it takes.
$(READY): $(USER_READY)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
