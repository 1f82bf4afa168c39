"""Mamba 2 also writes a state inside a chunk of a prompt, into a block of its own: a checkpoint. Whatever kvlane takes
for the state at a block's end has to be that, until its save has ended. vLLM's scheduler plans; the model is played."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import window_group

from kvlane.connector.groups import STATE
from kvlane.connector.saves import block_if_intact
from kvlane.demo.model import build_family

checkpoint = pytest.importorskip("vllm.model_executor.layers.mamba.checkpoint", reason="no checkpoints")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

# So few blocks that requests are preempted.
BLOCK, BLOCKS = 32, 42
FULL, STATES = 0, 1
# Steps for which a save holds a block.
HELD = 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = build_family(tmp_path_factory.mktemp("states") / "model", "qwen3-next")
    options: dict[str, Any] = {"max_num_batched_tokens": 200, "max_model_len": 1024, "max_num_seqs": 4}
    return EngineArgs(
        model=str(model), dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=True, **options
    ).create_engine_config()


class Store(KVConnectorBase_V1, SupportsHMA):
    """A connector that has all blocks of attention, and the states whose saves have ended. Its loads take a step."""

    def __init__(self, engine: Played, caches: KVCacheConfig) -> None:
        self._engine, self._kv_cache_config = engine, caches
        self.states: set[bytes] = set()
        """Hashes of the blocks at whose ends they are."""
        self.loading: set[str] = set()
        self.loads = 0
        self._promised: dict[str, int] = {}
        """Blocks of each request's last hit."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        for end in range((request.num_tokens - 1) // BLOCK, num_computed_tokens // BLOCK, -1):
            if self._engine.raw_hash(request, end - 1) in self.states:
                self._promised[request.request_id] = end
                return end * BLOCK - num_computed_tokens, True
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            table = self._engine.managers[STATES].req_to_blocks[request.request_id]
            end = self._promised[request.request_id]
            self._engine.write(table[end - 1], seen(request, end * BLOCK))
            self.loading.add(request.request_id)
            self.loads += 1

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def take_loaded(self) -> set[str]:
        loaded, self.loading = self.loading, set()
        return loaded

    # What a worker does is played.
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


class Played:
    """An engine whose model writes, instead of a state, a name of all tokens that it has seen."""

    def __init__(self, config: Any, hash_tokens: int | None, retention: int | None, alignment: int) -> None:
        self._of_backend = alignment
        cache = config.cache_config
        cache.block_size, cache.mamba_block_size, cache.prefix_match_unit = BLOCK, BLOCK, hash_tokens
        cache.prefix_cache_retention_interval = retention
        full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        states = MambaSpec(
            block_size=BLOCK,
            shapes=((8, 8),),
            dtypes=(torch.float32,),
            page_size_padded=full.page_size_bytes,
            mamba_type="mamba2",
            mamba_cache_mode="align",
            num_prefill_checkpoint_blocks=1,
            prefill_checkpoint_alignment=alignment,
        )
        groups = [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["states"], states)]
        caches = KVCacheConfig(BLOCKS, [], groups, prefix_cache_retention_interval=retention)
        cache.num_gpu_blocks = BLOCKS
        block_size, self._hash_tokens = resolve_kv_cache_block_sizes(caches, config)
        self._alignment = resolve_cache_hit_alignment_tokens(caches, config, block_size, self._hash_tokens)
        caches.hash_block_size, caches.cache_hit_alignment_tokens = self._hash_tokens, self._alignment
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=self._hash_tokens,
        )
        self.managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.store = self.scheduler.connector = Store(self, caches)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(self._hash_tokens, sha256)
        self.states: dict[int, int] = {}
        """The state in each block."""
        self._held: list[tuple[int, Any, int, bytes]] = []
        """Blocks that are being saved: until which step, the block, its state, and its hash."""
        self.saved = self.checkpoints = self.preempted = 0
        self._group = replace(window_group(STATES, 1, BLOCK), kind=STATE, group_id=STATES)

    def ask(self, name: str, prompt: list[int], tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher))

    def step(self, number: int) -> None:
        """One step of all requests."""
        pool = self.scheduler.kv_cache_manager.block_pool
        for _, block, _, raw in [each for each in self._held if each[0] <= number]:
            pool.free_blocks([block])
            self.store.states.add(raw)
        self._held = [each for each in self._held if each[0] > number]
        output = self.scheduler.schedule()
        loaded = self.store.take_loaded()
        for copy in output.kv_cache_block_copies or ():
            # Of all groups; a group's ids are its own.
            if copy.src_block_id in self.states:
                self._write_at(copy.dst_block_id, self.states[copy.src_block_id])
        found = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            table = list(self.managers[STATES].req_to_blocks[name])
            found += self._to_save(request, table, end)
            self._compute(request, table, end - count, end)
        for block, state, raw in found:
            assert self.states[block.block_id] == state, "a state at another place than its block's end"
            pool.touch([block])
            self._held.append((number + random.Random(number).randint(1, HELD), block, state, raw))
            self.saved += 1
        names = list(output.num_scheduled_tokens)
        sampled = [[7] if self._is_done(name) else [] for name in names]
        told = KVConnectorOutput(finished_recving=loaded) if loaded else None
        made = ModelRunnerOutput(
            names, {name: at for at, name in enumerate(names)}, sampled, kv_connector_output=told
        )
        self.preempted += len(output.preempted_req_ids or ())
        self.scheduler.update_from_output(output, made)

    def _is_done(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_tokens

    def raw_hash(self, request: Any, place: int) -> bytes:
        """vLLM's hash of a prompt's block."""
        return request.block_hashes[(place + 1) * (BLOCK // self._hash_tokens) - 1]

    def _to_save(self, request: Any, table: list[Any], end: int) -> list[tuple[Any, int, bytes]]:
        """The blocks of which the connector, when it plans this step, takes that they hold a state at their ends."""
        found = []
        for place, block in enumerate(table[: end // BLOCK]):
            raw = self.raw_hash(request, place)
            if block_if_intact(block, raw, self._group, exact=True):
                found.append((block, seen(request, (place + 1) * BLOCK), raw))
        return found

    def _compute(self, request: Any, table: list[Any], start: int, end: int) -> None:
        """What the model writes in a step, as vLLM's worker finds the places."""
        source, running = (start - 1) // BLOCK, -(-end // BLOCK) - 1
        if start > 0:
            before = self.states[table[source].block_id]
            assert before == seen(request, start), "the state from which the step goes on"
        [offset], [column] = checkpoint.compute_mamba_prefill_checkpoints(
            [end],
            [end - start],
            hash_block_size=self._hash_tokens,
            mamba_block_size=BLOCK,
            checkpoint_alignment=self._of_backend,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=self._alignment,
        )
        if offset > 0:
            self.write(table[column], seen(request, start + offset))
            self.checkpoints += not table[column].is_null
        self.write(table[running], seen(request, end))

    def write(self, block: Any, state: int) -> None:
        if not block.is_null:
            self._write_at(block.block_id, state)

    def _write_at(self, number: int, state: int) -> None:
        being_saved = {block.block_id: saved for _, block, saved, _ in self._held}
        assert being_saved.get(number, state) == state, "a state that is being saved was overwritten"
        self.states[number] = state


def seen(request: Any, tokens: int) -> int:
    """The state after a request's first tokens."""
    return hash(tuple(request.all_token_ids[:tokens]))


def prompts(source: random.Random) -> Iterator[list[int]]:
    """Prompts that begin alike at times."""
    before: list[list[int]] = [[]]
    while True:
        known = source.choice(before)
        begin = known[: source.choice([len(known), source.randrange(len(known) + 1)])]
        made = begin + [source.randrange(4, 1000) for _ in range(source.randint(1, 400))]
        before.append(made[:500])
        yield made[:500]


def run(config: Any, seed: int, hash_tokens: int | None, retention: int | None, alignment: int = 1) -> Played:
    """Twenty requests."""
    source = random.Random(seed)
    engine, made = Played(config, hash_tokens, retention, alignment), prompts(source)
    asked = step = 0
    while asked < 20 or engine.scheduler.has_unfinished_requests():
        if asked < 20 and source.random() < 0.3:
            asked += 1
            engine.ask(f"r{asked}", next(made), source.randint(1, 60))
        engine.step(step)
        step += 1
        assert step < 10_000
    return engine


@pytest.mark.parametrize("alignment", [1, 64], ids=["anywhere", "at each 64th token of a chunk"])
@pytest.mark.parametrize("retention", [None, 0, 64], ids=["all states", "ends of prompts", "each second"])
def test_what_has_the_hash_of_a_block_is_the_state_at_its_end_and_stays_it(
    config: Any, retention: int | None, alignment: int
) -> None:
    ran = [run(config, seed, None, retention, alignment) for seed in range(12)]
    for counted in ("saved", "checkpoints"):
        assert sum(getattr(engine, counted) for engine in ran) > 50, counted
    assert sum(engine.store.loads for engine in ran) > 10
    assert sum(engine.preempted for engine in ran) > 5


def test_with_hashes_inside_blocks_another_state_has_the_hash(config: Any) -> None:
    """The control, and why kvlane refuses that."""
    with pytest.raises(AssertionError, match="a state at another place"):
        for seed in range(12):
            run(config, seed, 8, 0)
