# Two commands matter: `make demo` and `make test`. Each makes .venv by itself and costs nothing twice.
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: demo demo-model torch-env rig-vllm rig-smol rig-systemd test test-all lint check venv clean bench-step bench-peers bench-faults

venv: .venv/.installed-dev

# The order-only split keeps the second call free: the stamps are newer than what they depend on.
.venv/.installed: pyproject.toml constraints.txt tools/bootstrap.py
	@$(PYTHON) tools/bootstrap.py run
.venv/.installed-dev: .venv/.installed
	@$(PYTHON) tools/bootstrap.py dev

# Torch is large and only needed by what needs it: an environment of its own. TORCH_INDEX is honoured.
torch-env:
	@$(PYTHON) tools/torch_env.py make

# Tests against a real vLLM, its CPU build: 1 GB to download, 3.8 GB in the user's cache, once.
rig-vllm: .venv/.installed-dev
	@$(PY) tools/rig_vllm.py

# Tests of Smol Machines in an emulated host that has KVM: root on Debian, 10 minutes.
rig-smol: .venv/.installed-dev
	@$(PY) tools/rig_smol.py

# Boxes by the control groups of systemd, in an emulated host: root on Debian, 30 minutes where busy.
rig-systemd: .venv/.installed-dev
	@$(PY) tools/rig_systemd.py

demo: .venv/.installed
	@$(PY) examples/humaneval/demo.py

demo-model: torch-env
	@.venv-torch/bin/python examples/humaneval/model_demo.py

test: .venv/.installed-dev
	@$(PY) tools/check.py test

test-all: .venv/.installed-dev
	@$(PY) tools/check.py all

lint: .venv/.installed-dev
	@$(PY) tools/check.py lint

bench-step: .venv/.installed
	@$(PY) -m stoker.cli.main bench step

# Other queues, for comparisons only: 450 MB in an environment of their own.
bench-peers:
	@$(PYTHON) tools/bench_faults/peers.py

bench-faults: .venv/.installed bench-peers
	@$(PY) tools/bench_faults/faults.py

clean:
	rm -rf .venv .venv-torch .venv-peers build dist
