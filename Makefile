# The two commands of the README are `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-long slurm chromium criu azurite kubernetes prometheus torchtitan check bench gpu gpu-pack campaign clean

$(VENV)/.core: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.core
	$(BIN)/trainckpt prove --nproc 2 --stops 2 -- examples/char_gpt.py --size small \
	  --parallel ddp --steps 8 --accumulate 3 --workers 2 --save-every 3 --dropout 0.1

test: $(VENV)/.dev slurm criu azurite chromium
	$(BIN)/python -m compileall -q src tests examples
	$(BIN)/python -m pytest -q -n 4 --dist worksteal --durations 15

$(VENV)/.acceptance: $(VENV)/.dev
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[acceptance]'
	@touch $@

test-long: $(VENV)/.acceptance torchtitan kubernetes prometheus
	$(BIN)/python -m pytest -q -n 2 -m long

# By apt, where this is root; otherwise the tests that need it are skipped.
slurm:
	@sh tests/slurm/install.sh

# A browser for the tests of `trainckpt report --html`, likewise; half a minute.
chromium:
	@sh tests/install_chromium.sh

# From a newer Debian release, into the environment; quick when it is there. docs/process-dumps.md
criu: $(VENV)/.core
	@$(BIN)/python -m trainckpt.process_dump.install || echo "tests that dump processes are skipped" >&2

# Microsoft's own server of blobs, 190 MB, where there is npm, or apt and root; otherwise the tests of
# az:// are skipped.
azurite: $(VENV)/.core
	@sh tests/install_azurite.sh $(VENV)/azurite

# Built from Debian's sources, by apt as root, once, in some minutes; otherwise the tests that need
# an API server are skipped.
kubernetes: $(VENV)/.core
	@sh tests/kubernetes/install.sh $(VENV)/kubernetes || echo "tests of Kubernetes are skipped" >&2

# Debian's packages, 23 MB, unpacked into the environment, where there is apt; otherwise the tests that
# need it are skipped.
prometheus: $(VENV)/.core
	@sh tests/metrics/install.sh $(VENV)/prometheus

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# An environment inside the environment, 30 MB; otherwise the tests of torchtitan are skipped.
torchtitan: $(VENV)/.acceptance
	@sh tests/install_torchtitan.sh $(VENV)

$(VENV)/.bench: $(VENV)/.dev
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

# Half an hour or more on 2 cores that have nothing else to do, 3 GB of memory, 3 GB of disk; nothing
# it measures means much on a busy machine.
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.compare --ranks 2 --gigabytes 0.3 --compute busy,off-cpu \
	  --json benchmarks/results/compare.json --png benchmarks/results/compare.png
	$(BIN)/python -m benchmarks.startup --gigabytes 0.3 --json benchmarks/results/startup.json
	$(BIN)/python -m benchmarks.warm_start --rounds 5 --json benchmarks/results/warm_start.json
	$(BIN)/python -m benchmarks.lora --json benchmarks/results/lora.json
	$(BIN)/python -m benchmarks.local_tier --json benchmarks/results/local_tier.json
	$(BIN)/python -m benchmarks.boundary --json benchmarks/results/boundary.json
	$(BIN)/python -m benchmarks.loader --json benchmarks/results/loader.json
	$(BIN)/python -m benchmarks.encryption --json benchmarks/results/encryption.json
	$(BIN)/python -m benchmarks.small_state --json benchmarks/results/small_state.json
	$(BIN)/python -m benchmarks.many_tensors --json benchmarks/results/many_tensors.json \
	  --png benchmarks/results/many_tensors.png
	$(BIN)/python -m benchmarks.compression --json benchmarks/results/compression.json
	$(BIN)/python -m benchmarks.stop --json benchmarks/results/stop.json
	$(BIN)/python -m benchmarks.scale --json benchmarks/results/scale.json
	$(BIN)/python -m benchmarks.growth --json benchmarks/results/growth.json \
	  --png benchmarks/results/growth.png
	$(BIN)/python -m benchmarks.planning --json benchmarks/results/planning.json

$(VENV)/.gpu: $(VENV)/.dev
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[gpu]'
	@touch $@

# On a machine with a GPU: docs/gpu.md. `make gpu-pack` prepares what one without a network lacks.
gpu: $(VENV)/.gpu criu
	$(BIN)/python -m benchmarks.gpu --json gpu.json --minutes 7

gpu-pack: $(VENV)/.core criu
	$(BIN)/python -m benchmarks.gpu.pack

campaign: $(VENV)/.dev
	$(BIN)/python -m tests.campaign --budget 8m --append benchmarks/results/campaign.jsonl

clean:
	rm -rf $(VENV) build src/*.egg-info
