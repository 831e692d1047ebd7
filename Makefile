# `make serve` and `make test` install what they need. ARGS goes to the program: make serve ARGS="--port 9000"
.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all test-vllm check bench-peers bench-strategies format lock clean

BIN := .venv/bin
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--custom-compile-command "make lock"

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' Makefile

setup: ## create .venv with exactly what requirements/*.lock pin
	@scripts/setup-venv

serve: setup ## serve a real model on http://127.0.0.1:8000/v1
	@exec $(BIN)/headrace serve $(ARGS)

test: setup check ## lint, types and the tests
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: setup check ## the same with the slow tests
	$(BIN)/python -m pytest $(ARGS)

VLLM_ENV ?= .venv-vllm

test-vllm: setup ## the scheduler inside vLLM, in an environment of its own (installs vLLM for the CPU: 3.5 GB)
	$(BIN)/python scripts/setup_vllm_env.py $(VLLM_ENV)
	VLLM_LOGGING_LEVEL=WARNING $(VLLM_ENV)/bin/python -m pytest tests/vllm $(ARGS)

check: setup ## lint, format and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-peers: setup ## headrace beside llama-server and others under mixed traffic (half an hour)
	$(BIN)/python -m benchmarks.peers $(ARGS)

bench-strategies: setup ## headrace's strategies beside one another under mixed traffic
	$(BIN)/python -m benchmarks.peers --strategies hybrid static dynamic continuous --no-llama-server $(ARGS)

format: setup ## format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The newest versions that fit pyproject.toml. Needs uv (pip install uv). pip is in build.lock and the
# llama.cpp bindings are in llama.lock: each of those is installed by a step of its own.
lock: ## choose versions anew and write requirements/*.lock
	$(LOCK) --upgrade pyproject.toml --extra llama --extra bench --extra locust --group dev \
		--no-emit-package pip --no-emit-package llama-cpp-python -o requirements/all.lock
	$(LOCK) --upgrade --group build -c requirements/all.lock -o requirements/build.lock
	$(LOCK) --upgrade --no-deps --group llama -o requirements/llama.lock

clean: ## remove .venv and everything made
	rm -rf .venv .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
