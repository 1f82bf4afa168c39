# A fresh machine needs Python 3.10 or newer with pip, make, a C compiler and a Rust toolchain; nothing else.
PYTHON ?= python3
OUT ?= out
ENVIRONMENT = $(PYTHON) scripts/environment.py
DEV = .venvs/dev/bin
VLLM = .venvs/vllm-0.32/bin
OLD_VLLM = .venvs/vllm-0.24/bin
# Tests start `kvlane` and find it beside their Python.
PYTEST_DEV = PATH="$(CURDIR)/$(DEV):$$PATH" $(DEV)/python -m pytest
PYTEST_VLLM = PATH="$(CURDIR)/$(VLLM):$$PATH" $(VLLM)/python -m pytest
PYTEST_OLD_VLLM = PATH="$(CURDIR)/$(OLD_VLLM):$$PATH" $(OLD_VLLM)/python -m pytest
# Faults of a daemon that only the in-process fake can be made to show at a given moment.
FAULTS = without_a_daemon or abort or fails or slow_lookups or random_faults
export KVLANE_CONTRACT_BASES = $(CURDIR)/.cache/contract

.PHONY: help demo test test-long fuzz lint rust python engines bench serve dev vllm wheel docs pins clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## a real vLLM, on the GPU if there is one, cold, warm, killed, restarted, from SSD: table, out/demo.json, out/demo.png
	$(PYTHON) scripts/demo.py --out $(OUT) $(ARGS)

test: lint rust python engines ## everything that must hold before a change lands (below 45 minutes on two cores)

lint: dev ## formatting, clippy, ruff, types
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	$(DEV)/ruff format --check .
	$(DEV)/ruff check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(DEV)/pyright
	$(DEV)/kvlane reference docs/reference --check
	$(DEV)/python scripts/figures.py --check

rust: ## tests of the crates
	cargo test --locked --workspace

python: dev ## tests without vLLM: the daemon, the connector's units, the benchmarks
	$(PYTHON) scripts/fetch_contract_bases.py
	$(PYTEST_DEV) -m "not long" tests/daemon tests/connector tests/bench tests/fabric

engines: vllm ## tests with real vLLM, newest and oldest
	KVLANE_TEST_CORE=real $(PYTEST_VLLM) tests/connector/test_vllm_*.py tests/engine
	$(PYTEST_VLLM) tests/connector/test_vllm_*.py -k "$(FAULTS)"
	$(ENVIRONMENT) vllm-0.24
	KVLANE_TEST_CORE=real $(PYTEST_OLD_VLLM) -m old_vllm tests/connector/test_vllm_*.py

test-long: dev ## the second stage: 1,000 rounds each of kills and of canaries, long property tests, loom, fuzzing
	PROPTEST_CASES=20000 cargo test --locked --release -p kvlane-block -p kvlane-memory -p kvlane-policy -p kvlane-store -p kvlane-proto
	KVLANE_TEST_ROUNDS=1000 cargo test --locked --release -p kvlane-server --test gpu canary
	PROPTEST_CASES=100 KVLANE_TEST_ROUNDS=1000 cargo test --locked --release -p kvlane-ssd
	KVLANE_TEST_ROUNDS=1000 cargo test --locked --release -p kvlane-fabric --test processes come_and_go
	KVLANE_TEST_ROUNDS=1000 cargo test --locked --release -p kvlane-fabric --test same_host come_and_go
	RUSTFLAGS="--cfg loom" cargo test --locked --release -p kvlane-fabric --lib loom
	$(PYTEST_DEV) -m long tests/daemon
	$(PYTHON) scripts/fuzz.py --seconds 30

fuzz: ## every fuzz target for a minute, or make fuzz ARGS="--seconds 3600 ssd_file"; needs a C++ compiler
	$(PYTHON) scripts/fuzz.py $(ARGS)

bench: vllm ## every benchmark, or make bench BENCH=serve ARGS="--model ..."
	PATH="$(CURDIR)/$(VLLM):$$PATH" kvlane bench $(or $(BENCH),all) $(ARGS)

serve: dev ## a daemon with a 4 GB pool, for trying things out
	$(DEV)/kvlane serve --pool-size 4gb

dev: ## the environment .venvs/dev: kvlane, tests and lints
	@$(ENVIRONMENT) dev

vllm: ## the environment .venvs/vllm-0.32: kvlane and vLLM for the CPU
	@$(ENVIRONMENT) vllm-0.32

docs: dev ## the pages in docs/reference, made from the code
	$(DEV)/kvlane reference docs/reference

wheel: ## only the wheel
	@$(ENVIRONMENT) --wheel-only

pins: dev ## pin requirements/*.txt again from requirements/*.in
	$(PYTHON) scripts/pin.py --uv .venvs/boot/bin/uv

clean: ## what was built; keeps the environments
	rm -rf build dist $(OUT) .cache/wheel python/*.egg-info
	cargo clean
