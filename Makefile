# make demo [TARGET=smollm2|tiny]   the whole way on a small target, on CPU
# make families [TARGET=...]            the same with one drafter of every family (half an hour for smollm2 on 2 cores)
# make bench                           attention, a whole training step, the trainer's speed and memory, a sweep's overhead, capture, reading, preparation, generation and decoding against named alternatives (three quarters of an hour)
# make test                         everything that has to pass: ruff, mypy, import-linter, pytest
# make check                        the same without pytest
# make clean                        removes what make has made here (the cache of targets stays)
PYTHON ?= python3
TARGET ?= smollm2
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvshot-ds
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

export KVSHOT_SMOLLM2 := $(CACHE)/smollm2
export PATH := $(BIN):$(PATH)

.PHONY: demo families bench test check clean smollm2
.DELETE_ON_ERROR:

demo: $(VENV)/demo.stamp
	@recipes/demo.sh $(TARGET)

families: $(VENV)/demo.stamp
	@recipes/demo.sh $(TARGET) hidden_only mtp kv_only kv_none hybrid dflash kv_block hybrid_block

bench: $(VENV)/demo.stamp
	python -m benchmarks.attention
	python -m benchmarks.step
	python -m benchmarks.train
	python -m benchmarks.memory
	python -m benchmarks.sweep
	@kvshot target smollm2 "$(KVSHOT_SMOLLM2)"
	python -m benchmarks.capture --target "$(KVSHOT_SMOLLM2)"
	python -m benchmarks.read
	python -m benchmarks.prepare --target "$(KVSHOT_SMOLLM2)"
	python -m benchmarks.generate --target "$(KVSHOT_SMOLLM2)"
	python -m benchmarks.decode --target "$(KVSHOT_SMOLLM2)"

test: check smollm2
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(VENV)/dev.stamp
	ruff check .
	mypy
	lint-imports --no-logo

smollm2: $(VENV)/dev.stamp
	@kvshot target smollm2 "$(KVSHOT_SMOLLM2)"

clean:
	rm -rf $(VENV) work build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvshot-ds needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.11 ..." >&2; exit 2; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }

# torch goes first: whatever build of this version the machine's pip prefers (CPU or CUDA) then satisfies everything else.
$(VENV)/torch.stamp: constraints.txt | $(BIN)/python
	@echo "installing torch (about half a minute, longer where a CUDA build is downloaded)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/demo.stamp: EXTRAS := demo
$(VENV)/dev.stamp: EXTRAS := demo,dev
$(VENV)/demo.stamp $(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml
	@echo "installing kvshot-ds[$(EXTRAS)] and what it needs (about two minutes)"
	@$(PIP) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@
