"""A model with states beside full attention: a hit needs all blocks of the one, and a state at its end of the other."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCK, InProcessEngine, Make, prompt
from processes import until
from stores import DaemonStore, FakeStore

from kvlane.connector import capabilities
from kvlane.demo.model import build_family

pytestmark = pytest.mark.skipif(
    not capabilities.reports_failed_requests(), reason="this vLLM cannot be told of a failed load"
)


@dataclass
class Model:
    path: Path
    block: int
    """vLLM makes a block of attention as large as a state."""
    options: dict[str, Any]


@pytest.fixture(scope="module", params=["qwen3-next", "granite4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = build_family(tmp_path_factory.mktemp("states") / "model", request.param)
    if request.param == "qwen3-next":
        return Model(path, 96, {"dtype": "bfloat16", "max_num_batched_tokens": 256})
    return Model(path, 32, {"max_num_batched_tokens": 32, "enable_prefix_caching": True})


def group_of_states(engine: InProcessEngine, model: Model) -> bytes:
    """Its namespace."""
    shape = engine.connector._scheduler._shape
    assert [(group.kind, group.tokens_per_block, group.window_blocks) for group in shape.groups] == [
        ("mamba", model.block, 1),
        ("full_attention", model.block, 0),
    ]
    return shape.namespaces[0]


def sized(engine: InProcessEngine, model: Model) -> dict[str, int]:
    """Bytes of this engine's blocks and states by vLLM's own specifications."""
    states = full = 0
    for group in engine.scheduler.kv_cache_config.kv_cache_groups:
        spec, layers = group.kv_cache_spec, len(group.layer_names)
        if hasattr(spec, "shapes"):
            numbers = zip(spec.shapes, spec.dtypes, strict=True)
            states += layers * sum(prod(shape) * dtype.itemsize for shape, dtype in numbers)
        else:
            full += layers * spec.page_size_bytes
    page = 4096
    return {
        "tokens_per_block": model.block,
        "bytes_per_block": -(-full // page) * page,
        "bytes_per_state": -(-states // page) * page,
    }


def told_by_kvlane(model: Model) -> dict[str, int]:
    """The same by `kvlane size`, which reads the model's configuration alone."""
    command = ["kvlane", "size", str(model.path), "--tokens", "1000", "--block-size", str(BLOCK), "--json"]
    # vLLM's linear attention for CPUs takes no other matrices.
    command += [
        "--kv-cache-dtype",
        model.options.get("dtype", "float32"),
        "--mamba-ssm-cache-dtype",
        "float32",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    told = json.loads(done.stdout)
    return {name: told[name] for name in ("tokens_per_block", "bytes_per_block", "bytes_per_state")}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DaemonStore]:
    made = DaemonStore(tmp_path, "--ssd", f"{tmp_path / 'blocks'}:256mib")
    yield made
    made.close()


def test_answers_are_those_of_the_engine_alone(make: Make, store: DaemonStore, model: Model) -> None:
    """Prompts shorter than a block, a whole number of blocks, one token more, of several steps; and one that goes on
    where another ended. Warm, in an engine that was started again, and from the SSD after the daemon was, too."""
    engine = make(model.path, **model.options)
    group_of_states(engine, model)
    assert told_by_kvlane(model) == sized(engine, model)
    prompts = [prompt(length, length) for length in (95, 96, 97, 300, 384, 385, 700)]
    cold = [engine.generate(each, 24)[0] for each in prompts]
    assert len({tuple(answer) for answer in cold}) == len(cold)
    longer = prompts[3] + cold[3] + prompt(5, 150)
    answer_of_longer, _ = engine.generate(longer)
    asked = list(zip([*prompts, longer], [*cold, answer_of_longer], strict=True))
    store.settle()
    for restarted in (0, 1, 2):
        if restarted == 2:
            until("all is on the SSD", store.is_all_on_ssd)
            store.restart()
        if restarted:
            engine = make(model.path, **model.options)
        engine.forget()
        for each, answer in asked:
            warm, cached = engine.generate(each, len(answer))
            assert warm == answer
            assert cached == (len(each) - 1) // model.block * model.block
        assert engine.errors() == 0


def test_a_state_counts_and_one_that_is_gone_or_fails_to_load_is_computed(
    make_on_fake: Make, fake: FakeStore, model: Model
) -> None:
    engine = make_on_fake(model.path, policy="recompute", **model.options)
    namespace = group_of_states(engine, model)
    cold, _ = engine.generate(prompt(3), 24)
    engine.forget()
    fake.core.fail_loads = True
    assert engine.generate(prompt(3), 24)[0] == cold
    assert engine.counted["failed_loads"] == 1
    fake.core.fail_loads = False
    engine.forget()
    assert engine.generate(prompt(3), 24) == (cold, 288)
    states = [key for key in fake.core.blocks if key[0] == namespace]
    assert 1 <= len(states) < 300 // model.block
    # The control: with other states the answer is another one.
    pages = fake.core.pages[fake.core.boot]
    for key in states:
        for page in fake.core.blocks[key].values():
            pages[page] = bytes(len(pages[page]))
    engine.forget()
    other, cached = engine.generate(prompt(3), 24)
    assert other != cold and cached == 288
    # All blocks of attention are of no use then.
    for key in states:
        fake.core.evict(key)
    engine.forget()
    assert engine.generate(prompt(3), 24) == (cold, 0)
    assert engine.errors() == 0
