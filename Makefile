# make serve: a running server from nothing.   make test: everything that must hold.
# `uv` is taken from PATH, or else installed from PyPI into .uv/ here; the interpreter is .python-version's.

UV := $(or $(shell command -v uv 2>/dev/null),.uv/bin/uv)
PYTHON := .venv/bin/python
VENV := .venv/pyvenv.cfg
PORT ?= 8000
MODEL ?= demo:smollm2

.PHONY: setup serve test lint docs clean

setup: .venv/.stamp-demo

serve: .venv/.stamp-demo
	@echo
	@echo "  http://localhost:$(PORT)/docs          every endpoint, to read and to try (docs/server.md says more)"
	@echo "  http://localhost:$(PORT)/v1            base URL for the openai package; any API key will do"
	@echo "  .venv/bin/jaxserve chat --url http://localhost:$(PORT) --temperature 0        talk to it, from another terminal"
	@echo "  curl http://localhost:$(PORT)/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "       -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}], \"temperature\": 0}'"
	@echo
	@exec .venv/bin/jaxserve serve $(MODEL) --port $(PORT) $(ARGS)

# Kernels are compiled for TPUs and GPUs that are not here. libtpu stays out of .venv, where JAX would look for a chip
# with it; triton (1 GB) too, as only the tests need it. Two processes share the test files.
test: lint .tpu/.stamp .triton/.stamp
	PYTHONPATH=.tpu:.triton JAX_PLATFORMS=cpu $(PYTHON) -m pytest -n 2 --dist loadfile $(ARGS)

lint: .venv/.stamp-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright

# The support table of README and docs/support.md, from a run of the tests that carry its rows.
docs: .venv/.stamp-dev .tpu/.stamp .triton/.stamp
	PYTHONPATH=.tpu:.triton JAX_PLATFORMS=cpu $(PYTHON) -m pytest -m supports --support-report build/support.json
	$(PYTHON) -m bench.support build/support.json

clean:
	rm -rf .venv .uv .tpu .triton build *.egg-info

.venv/.stamp-%: pyproject.toml $(VENV) | $(UV)
	$(UV) pip install --quiet --python $(PYTHON) --editable '.[$*$(if $(filter dev,$*),$(comma)demo)]'
	@touch $@

.tpu/.stamp: pyproject.toml $(VENV) | $(UV)
	$(UV) pip install --quiet --python $(PYTHON) --target .tpu --no-deps 'libtpu>=0.0.30,<0.1'
	@touch $@

# --no-config: pyproject.toml keeps triton out of .venv, and would out of here.
.triton/.stamp: pyproject.toml $(VENV) | $(UV)
	$(UV) --no-config pip install --quiet --python $(PYTHON) --target .triton --no-deps 'triton>=3.9,<3.10'
	@touch $@

$(VENV): .python-version | $(UV)
	$(UV) venv --quiet --allow-existing .venv
	@touch $@

.uv/bin/uv:
	python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target .uv 'uv>=0.8,<1'

comma := ,
