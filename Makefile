# A fresh machine needs Python 3.10 or newer with pip, make, a C compiler and a Rust toolchain; `make fuzz` a C++ compiler.
PYTHON ?= python3
OUT ?= out
ENVIRONMENT = $(PYTHON) scripts/environment.py
# Runs targets one after the other; ends with the time of each and the slowest tests.
STAGES = $(PYTHON) scripts/stages.py
DEV = .venvs/dev/bin
VLLM = .venvs/vllm-0.32/bin
OLD_VLLM = .venvs/vllm-0.24/bin
# All crates, or those that `.ci/run` tests.
CRATES = $(shell $(PYTHON) scripts/cargo.py)
# Where runners leave the times of tests.
TIMES = .cache/times
# Tests start `kvlane` and find it beside their Python.
PYTEST_DEV = PATH="$(CURDIR)/$(DEV):$$PATH" $(DEV)/python -m pytest
PYTEST_VLLM = PATH="$(CURDIR)/$(VLLM):$$PATH" $(VLLM)/python -m pytest
# With a cache of its own: what vLLM remembers of a model is no use to another version, and each overwrites the other's.
PYTEST_OLD_VLLM = PATH="$(CURDIR)/$(OLD_VLLM):$$PATH" VLLM_CACHE_ROOT="$${XDG_CACHE_HOME:-$$HOME/.cache}/vllm-0.24" $(OLD_VLLM)/python -m pytest
# Two processes run tests of engines, each with files of its own; tests/conftest.py has the order.
TWO = -n 2 --dist loadfile
export KVLANE_CONTRACT_BASES = $(CURDIR)/.cache/contract

.PHONY: help demo demo-pd demo-direct demo-cluster test gate soak soak-day fetch build lint rust python engines oldest data-parallel wheel packaging manylinux loom miri fuzz bench serve \
	dev vllm docs pictures pins clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## a real vLLM, on the GPU if there is one, cold, warm, killed, restarted, from SSD: table, out/demo.json, out/demo.png
	$(PYTHON) scripts/demo.py --out $(OUT) $(ARGS)

demo-pd: ## a prefill and a decode engine behind kvlane route, on GPUs if there are any: tables, out/demo-pd.json, out/demo-pd.png
	$(PYTHON) scripts/demo.py --program examples/run_pd.py --out $(OUT) $(ARGS)

demo-direct: ## prompts from a prefill engine straight into a decode engine, real vLLMs on the CPU: out/demo-direct.json, .png
	@$(ENVIRONMENT) --release vllm-0.32
	PATH="$(CURDIR)/$(VLLM):$$PATH" $(VLLM)/python examples/direct_pd.py --out $(OUT) $(ARGS)

demo-cluster: ## what one host computed is a hit on the next, two daemons and two real vLLMs on the CPU: out/demo-cluster.json, .png
	@$(ENVIRONMENT) --release vllm-0.32
	PATH="$(CURDIR)/$(VLLM):$$PATH" $(VLLM)/python examples/cluster.py --out $(OUT) $(ARGS)

test: ## what a change could break, in about 25 minutes on two cores
	$(STAGES) fetch build lint rust python engines

gate: ## what a change must pass beside `make test` before it lands: other vLLMs, an installed wheel, loom, miri
	$(STAGES) packaging oldest data-parallel loom miri

soak: ## long loops, long fuzzing, all engines, the demo: make soak [MINUTES=60] [PARTS="fuzz loom"] [FORMER=WHEEL]
	$(PYTHON) scripts/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(FORMER),--former-wheel $(FORMER)) $(PARTS)

soak-day: ## a day's work of daemon and router in an hour; memory, descriptors, threads: out/soak-day.json; or MINUTES=5
	@$(ENVIRONMENT) --release dev
	KVLANE_TEST_MINUTES=$(or $(MINUTES),60) KVLANE_TEST_OUT="$(abspath $(OUT))" $(PYTEST_DEV) -m soak -s tests/router/test_soak_day.py

fetch: ## what `make test` needs from registries; ARGS: more environments
	cargo fetch --locked
	cargo fetch --locked --manifest-path fuzz/Cargo.toml
	$(ENVIRONMENT) --without-kvlane dev vllm-0.32 $(ARGS)
	$(PYTHON) scripts/fetch_contract_bases.py --into "$(KVLANE_CONTRACT_BASES)"
	$(PYTHON) scripts/dependencies.py --fetch
	$(PYTHON) scripts/promtool.py
	$(PYTHON) scripts/browser.py
	$(PYTHON) scripts/helm.py

build: dev vllm ## the crates, their tests, and the environments that have them

lint: dev ## formatting, clippy, Rust's pages, dependencies, ruff, types, circles of files, whether tests/defects fits
	cargo fmt --all --check
	cargo clippy --locked $(CRATES) --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps $(CRATES)
	$(DEV)/python scripts/dependencies.py
	$(DEV)/ruff format --check .
	$(DEV)/ruff check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(DEV)/pyright
	$(DEV)/python scripts/settings_table.py docs/configure.md --check
	$(DEV)/python scripts/counters_table.py docs/reference/engine-metrics.md --check
	$(DEV)/python scripts/logs_table.py docs/reference/logs.md --check
	$(DEV)/python scripts/manifests.py --check
	$(DEV)/kvlane reference docs/reference --check
	$(DEV)/python scripts/dashboards.py --check
	$(DEV)/python scripts/figures.py --check
	$(DEV)/python bench/redraw.py --check
	$(DEV)/python scripts/circles.py
	$(DEV)/python scripts/prose.py --check
	git apply --check tests/defects/*.patch

rust: ## tests of the crates, or make rust ARGS="-p kvlane-ssd --test kill -- --nocapture"
	$(PYTHON) scripts/rust_tests.py $(or $(ARGS),--workspace)

python: dev ## tests without vLLM: the daemon, the connector's units, the benchmarks; or ARGS="-k ssd"
	$(PYTHON) scripts/fetch_contract_bases.py --into "$(KVLANE_CONTRACT_BASES)"
	$(PYTEST_DEV) -n 3 --dist worksteal --junitxml $(TIMES)/python.xml -m "not soak$(if $(RELEASE), and not fake_gpus)" $(ARGS)

engines: vllm ## tests with the newest real vLLM; or ARGS=tests/engine
	$(PYTEST_VLLM) $(if $(ARGS),,$(TWO)) --junitxml $(TIMES)/engines.xml -m "not gate and not soak$(if $(ARGS),, and not alone)" $(or $(ARGS),tests/connector/test_vllm_*.py tests/engine)
	$(if $(ARGS),,$(PYTEST_VLLM) --junitxml $(TIMES)/engines-alone.xml -m "alone and not gate and not soak" $(shell grep -l mark.alone tests/connector/*.py))

oldest: ## tests with the oldest real vLLM; OLDEST=all: also those that `make soak` runs
	$(ENVIRONMENT) $(if $(RELEASE),--release) vllm-0.24
	$(PYTEST_OLD_VLLM) $(TWO) --junitxml $(TIMES)/oldest.xml -m "old_vllm$(if $(OLDEST), or old_vllm_soak)" tests/connector/test_vllm_*.py tests/engine/test_moe_deep_ep.py

data-parallel: vllm ## data-parallel engines of the newest vLLM
	$(PYTEST_VLLM) -n 2 --dist worksteal --junitxml $(TIMES)/data-parallel.xml -m gate $(shell grep -l mark.gate tests/connector/*.py tests/engine/*.py)

wheel: ## the wheel that users get, for glibc 2.28 and newer: dist/kvlane-*.whl
	$(PYTHON) scripts/wheel.py

packaging: dev ## installs the tests' own wheel where there is no Rust, and uses it
	KVLANE_TEST_WHEEL=.cache/wheel/dev $(PYTEST_DEV) --junitxml $(TIMES)/packaging.xml tests/packaging/test_wheel.py

manylinux: wheel dev ## the same with the wheel that users get, which takes a release build
	KVLANE_TEST_WHEEL=dist $(PYTEST_DEV) --junitxml $(TIMES)/manylinux.xml tests/packaging

loom: ## all orders of the steps of two threads at the ring in shared memory, and of two ranks of an all-to-all
	RUSTFLAGS="--cfg loom" cargo test --locked --release --target-dir target/loom -p kvlane-shm-ring -p kvlane-moe --lib loom

miri: ## tests of the crates without I/O, by an interpreter that sees undefined behaviour, where it is installed
	$(PYTHON) scripts/miri.py

fuzz: ## every fuzz target for 5 s, or make fuzz ARGS="--seconds 3600 ssd_file"; needs a C++ compiler
	$(PYTHON) scripts/fuzz.py $(ARGS)

bench: ## every benchmark, or make bench BENCH=serve ARGS="--model ..."
	@$(ENVIRONMENT) --release vllm-0.32
	PATH="$(CURDIR)/$(VLLM):$$PATH" kvlane bench $(or $(BENCH),all) $(ARGS)

serve: ## a daemon with a 4 GB pool, for trying things out
	@$(ENVIRONMENT) --release dev
	$(DEV)/kvlane serve --pool-size 4gb

dev: ## the environment .venvs/dev: lints, and kvlane as tests want it
	@$(ENVIRONMENT) $(if $(RELEASE),--release) dev

vllm: ## the environment .venvs/vllm-0.32: vLLM for the CPU, and kvlane as tests want it
	@$(ENVIRONMENT) $(if $(RELEASE),--release) vllm-0.32

docs: dev ## the pages in docs/reference, made from the code, and the dashboards, made from these pages
	$(DEV)/kvlane reference docs/reference
	$(DEV)/python scripts/counters_table.py docs/reference/engine-metrics.md
	$(DEV)/python scripts/logs_table.py docs/reference/logs.md
	$(DEV)/python scripts/dashboards.py

pictures: dev ## the pictures in bench/*/results and docs/pictures, drawn from the results beside them
	$(DEV)/python bench/redraw.py

pins: dev ## pin requirements/*.txt again from requirements/*.in
	$(PYTHON) scripts/pin.py --uv .venvs/boot/bin/uv

clean: ## what was built; keeps the environments
	rm -rf build dist $(OUT) .cache/wheel .cache/times python/*.egg-info
	cargo clean
