# Everything a developer or a visitor runs. Needs make and Python 3.11 or newer, nothing else:
# the virtual environment .venv is made on first use and installed again only when
# pyproject.toml, constraints.txt or C sources change, or when the checkout was moved.

PYTHON ?=
MODEL ?= models/shoal-stories
PEERS ?= 3
TESTS ?= tests
JOBS ?= 3
ARGS ?=
PARTS ?=
BENCHMARKS ?=
SECONDS ?= 60
SEED ?=

# -P: the current folder stays off the import path, where `kernels` could meet another package.
RUN := .venv/bin/python -P
PIP_INSTALL := .venv/bin/python -m pip install -qq --disable-pip-version-check
NATIVE := $(wildcard kernels/native/*.[ch])
MOVED := $(if $(filter-out $(shell cat .venv/checkout 2>/dev/null),$(CURDIR)),FORCE)

export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1

.PHONY: help demo swarm monitor-demo train-demo images images-from-debian images-swarm test test-fast bitsandbytes test-bitsandbytes chaos check bench constraints proto clean FORCE
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' Makefile

demo: .venv/installed  ## watch a swarm on this machine survive the kill of a peer
	@.venv/bin/shoal demo $(ARGS)

swarm: .venv/installed  ## run PEERS=3 peers of MODEL on this machine until Ctrl-C
	@.venv/bin/shoal swarm "$(MODEL)" --peers $(PEERS) $(ARGS)

monitor-demo: .venv/installed  ## watch the health of a swarm on a web page while a peer dies and one joins
	@$(RUN) examples/watch_a_swarm.py $(ARGS)

train-demo: .venv/installed  ## train a model over peers that are killed, and compare its weights
	@.venv/bin/python examples/train_over_peers.py $(ARGS)

# ENGINE=podman or "buildah" do as well; ARGS are for its `build`, such as --build-arg. In the format
# of docker: OCI's has no health check, and podman would leave ours out.
ENGINE ?= docker
BUILD_IMAGE = $(ENGINE) build $(if $(findstring docker,$(ENGINE)),,--format docker) $(ARGS)

images:  ## build the container images shoal-peer and shoal-monitor
	@$(BUILD_IMAGE) -f docker/Dockerfile.peer -t shoal-peer .
	@$(BUILD_IMAGE) -f docker/Dockerfile.monitor -t shoal-monitor .

# With ENGINE=buildah, by a normal user. Of its isolations chroot asks least of the kernel: no network
# of its own, no control groups. pip is set up there as on this machine. WHEELS is a folder with a wheel
# of torch for the CPU, where PyTorch's own index of them is not reachable either.
WHEELS ?=
MOUNTED = $(wildcard /etc/pip.conf /etc/ssl/certs) $(abspath $(WHEELS))
TORCH_FROM = $(if $(WHEELS),--build-arg TORCH_FROM="--no-index --find-links $(abspath $(WHEELS))")

images-from-debian:  ## build them where no registry of images is reachable, and without root
	@docker/make_base_image.sh shoal-python
	@BUILDAH_ISOLATION=chroot $(MAKE) images ENGINE=buildah \
	    ARGS='--build-arg PYTHON_IMAGE=localhost/shoal-python $(TORCH_FROM) \
	    $(foreach path,$(MOUNTED),--volume $(path):$(path):ro) $(ARGS)'

# In the background: where it is attached, Ctrl-C ends peers that podman starts again at once.
images-swarm:  ## run the swarm of docker/compose.yaml from them with podman
	@docker/run_swarm.sh up -d $(ARGS)
	@echo "The monitor is at http://localhost:8480/, Prometheus at http://localhost:9090/."
	@echo "To end it, and remove its volumes: docker/run_swarm.sh down --volumes"

# Files of tests run JOBS at a time; threads of torch that wait for each other would spin meanwhile.
# Hundreds of p2pds live for seconds: they collect garbage only when they have much of it.
TEST_ENVIRONMENT := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
    GOGC=off GOMEMLIMIT=192MiB

# The order is that of tests/conftest.py, not by how many tests a file has. The limit is seven times
# what the longest test takes: it is for those that hang.
PYTEST := $(RUN) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder \
    --timeout 600 --timeout-method signal

test: .venv/installed-dev  ## run every test that needs no GPU; TESTS=tests/protocol for a part
	@$(TEST_ENVIRONMENT) $(PYTEST) -m "$(or $(MARKED),not gpu and not thorough)" $(TESTS) $(ARGS)

# One case of each test that neither starts a process nor takes a second.
test-fast: .venv/installed-dev  ## run one case of each quick test, for use before each commit
	@$(TEST_ENVIRONMENT) $(PYTEST) --one-case \
	    -m "not gpu and not thorough and not network and not slow" $(TESTS) $(ARGS)

# bitsandbytes is optional, and other libraries import it where it is installed: these tests alone see it.
BITSANDBYTES := $(shell sed -n 's/^bitsandbytes==/build\/bitsandbytes-/p' constraints.txt)

$(BITSANDBYTES): | .venv/installed-dev
	@$(PIP_INSTALL) --no-deps -c constraints.txt --target $@ bitsandbytes

bitsandbytes: $(BITSANDBYTES)

test-bitsandbytes: bitsandbytes  ## run the tests of 4-bit weights and 8-bit AdamW
	@PYTHONPATH=$(BITSANDBYTES) $(TEST_ENVIRONMENT) $(PYTEST) -m "not gpu and not thorough" \
	    $$(grep -rl --include='*.py' 'not has_bitsandbytes()' tests) $(ARGS)

# -m: the run is a program in several modules, which tests use as well.
CHAOS := PYTHONPATH=tests/parts:benchmarks $(TEST_ENVIRONMENT) $(RUN) -m chaos

chaos: .venv/installed-dev  ## kill, pause, cut off and start peers for SECONDS=60 while clients write; SEED=n
	@$(CHAOS) --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

check: .venv/installed-dev  ## check format, lint, types and structure
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m pyright --pythonpath .venv/bin/python
	@$(RUN) -m pytest -q tests/test_structure.py

# A part, or a run whose numbers mean nothing, leaves the published picture alone.
PLOT := $(if $(PARTS)$(findstring --quick,$(ARGS)),,--plot docs)

# -m: benchmarks are programs in several modules, as chaos is.
bench: .venv/installed-dev  ## measure and draw docs/sessions.*; PARTS="hop flood" for some of it
	@PYTHONPATH=benchmarks $(RUN) -m $(or $(BENCHMARKS),swarm_benchmarks $(PARTS) $(PLOT)) $(ARGS)

constraints: .venv/bin/python  ## resolve the newest versions and write constraints.txt
	@echo "Resolving every dependency in a fresh environment: a minute or more ..."
	@rm -rf build/constraints && mkdir -p build
	@.venv/bin/python -m venv build/constraints
	@build/constraints/bin/python -m pip install -qq --disable-pip-version-check -e '.[dev,cuda]'
	@{ sed -n '/^#/p; /^triton==/p' constraints.txt; \
	   build/constraints/bin/python -m pip list --disable-pip-version-check --format=freeze \
	       --exclude pip --exclude shoal \
	   | grep -viE '^(nvidia|cuda|triton)' | sed 's/+.*//'; } > build/constraints.txt
	@mv build/constraints.txt constraints.txt && rm -rf build/constraints
	@echo "Wrote constraints.txt; run 'make check test' before keeping it."

proto: .venv/installed-dev  ## generate code from operator.proto
	@$(RUN) -m grpc_tools.protoc -Ishoal/peer/operating=peer/operating --python_out=.typing \
	    --pyi_out=.typing shoal/peer/operating/operator.proto

clean:  ## remove the environment, caches and build results
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .benchmarks kernels/native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@for candidate in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "Creating .venv with $$($$candidate --version)"; \
	        "$$candidate" -m venv --clear .venv && exit 0; \
	        rm -rf .venv; \
	        echo "$$candidate cannot make a virtual environment (Debian, Ubuntu: install python3-venv)"; \
	        exit 1; \
	    fi; \
	done; \
	echo "shoal needs Python 3.11 or newer, and $(or $(PYTHON),python3) is not:" \
	    "run make PYTHON=/path/to/python3.11"; \
	exit 1

.venv/installed: pyproject.toml constraints.txt $(NATIVE) $(MOVED) | .venv/bin/python
	@echo "Installing shoal into .venv: about a minute, longer where torch comes with CUDA ..."
	@$(PIP_INSTALL) -c constraints.txt -e .
	@echo "$(CURDIR)" > .venv/checkout
	@touch $@

.venv/installed-dev: pyproject.toml constraints.txt $(NATIVE) $(MOVED) | .venv/bin/python
	@echo "Installing shoal and its tools into .venv: about a minute, longer where torch comes with CUDA ..."
	@$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@echo "$(CURDIR)" > .venv/checkout
	@touch .venv/installed $@
