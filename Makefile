# Two commands do everything on a fresh machine with Python 3.10 to 3.12: `make fit` and `make test`.
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/tiny.yaml
JOBS ?= auto
RUN := $(VENV)/bin
# A machine with an NVIDIA driver gets FBGEMM's CUDA build, which cannot be imported without one.
PLATFORM ?= $(if $(wildcard /proc/driver/nvidia/version),cuda,cpu)
STAMP := $(VENV)/.installed-$(PLATFORM)
REQUIREMENTS := requirements/torch.txt requirements/common.txt requirements/$(PLATFORM).txt

.PHONY: fit test lint setup clean
.DEFAULT_GOAL := help

help:
	@echo "make fit   set up, then train the tiny model on synthetic data (CONFIG=configs/... for another recipe)"
	@echo "make test  set up, then lint, check types and run the tests"

setup: $(STAMP)

# TorchRec's metadata names FBGEMM's CUDA build and an old torchmetrics, so the complete pinned list goes in without
# dependency resolution; only torch chooses its own. Triton comes with CUDA builds of torch, in the version they want.
$(STAMP): $(REQUIREMENTS) pyproject.toml
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -r requirements/torch.txt
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/$(PLATFORM).txt
	$(RUN)/python -c "import triton" 2>/dev/null || $(RUN)/python -m pip install --quiet --no-deps -r requirements/triton.txt
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

fit: $(STAMP)
	$(RUN)/lightning-gem fit --config $(CONFIG)

lint: $(STAMP)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

test: lint
	$(RUN)/python -m pytest -n $(JOBS) --dist loadgroup

clean:
	rm -rf $(VENV) build dist *.egg-info
