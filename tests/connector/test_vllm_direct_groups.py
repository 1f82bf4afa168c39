"""Prompts of models with several kinds of layers go directly from one real engine into another one's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from direct_pair import DIRECT, answer, both_params, land_kind, landed_blocks, step_until
from engine import InProcessEngine, prompt
from prefill_engine import CHUNK, PrefillEngine
from test_vllm_families import options

from kvlane.connector import capabilities
from kvlane.connector.groups import STATE
from kvlane.demo.families import FAMILIES
from kvlane.demo.model import build_family

TOKENS = 430
ANSWER = 12
IN_CI = ("gemma3", "qwen3-next")
SINCE_0_24 = ("gemma3", "llama4")

pytestmark = pytest.mark.old_vllm_soak


def marks(family: str) -> list[pytest.MarkDecorator]:
    """Two engines start for each family."""
    is_late = family not in SINCE_0_24 and not capabilities.reports_failed_requests()
    late = pytest.mark.skipif(
        is_late, reason="this vLLM computes no such model on CPUs, or its hits lack states"
    )
    return [late] if family in IN_CI else [late, pytest.mark.soak]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks(name)) for name in FAMILIES])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family(tmp_path_factory.mktemp(family) / "model", family)


@pytest.fixture(scope="module")
def p(path: Path, family: str, nobody: str, runtime_folder: None) -> Iterator[PrefillEngine]:
    engine = PrefillEngine(path, nobody, DIRECT, **options(family))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def d(path: Path, family: str, nobody: str, runtime_folder: None) -> Iterator[InProcessEngine]:
    # Other steps than P's would round states otherwise.
    engine = InProcessEngine(
        path, nobody, extra=DIRECT, **{"max_num_batched_tokens": CHUNK, **options(family)}
    )
    yield engine
    engine.close()


def expected(d: InProcessEngine, tokens: int) -> int:
    """Where vLLM's own hits of a prompt end."""
    return d.connector._scheduler.direct.order.tokens(tokens)


def layer_hook() -> object:
    """The hook of the decode engine's rank, which is in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker._shared.direct.layer_hook  # pyright: ignore


@pytest.mark.parametrize("tokens", [TOKENS, 417, 385, 97])
def test_a_prompt_lands_up_to_where_hits_end(p: PrefillEngine, d: InProcessEngine, tokens: int) -> None:
    asked = prompt(tokens, tokens)
    truth, start = p.ask("generate", asked, ANSWER), p.ask("books")
    own, landed = d.books(), d.counted["direct_landed"]
    for_p, for_d = both_params(p)
    name = d.add(asked, ANSWER, for_d)
    p.ask("prefill", asked, for_p)
    p.ask("finish")
    got, cached = answer(d, name)
    assert (got, cached) == (truth, expected(d, tokens))
    assert d.counted["direct_landed"] == landed + 1
    # vLLM computes Falcon-H1's state after the attention of its layer, and calls no hook behind it.
    assert (layer_hook() is None) == any(
        group.kind == STATE for group in d.connector._scheduler._shape.groups
    )
    d.generate(prompt(99, 40), 1)
    p.run_a_step()
    assert (d.books(), p.ask("books")) == (own, start)
    assert (d.errors(), p.ask("errors")) == (0, 0)


def test_the_beginning_that_an_engine_has_is_not_asked_for_again(
    p: PrefillEngine, d: InProcessEngine
) -> None:
    asked = prompt(1, TOKENS)
    longer = asked + prompt(2, 200)
    truth = p.ask("generate", longer, ANSWER)
    d.generate(asked, 1)
    p.ask("prefill", longer, {"do_remote_decode": True})
    params = p.ask("finish")
    landed = d.counted["direct_landed_tokens"]
    got, cached = answer(d, d.add(longer, ANSWER, params))
    assert (got, cached) == (truth, expected(d, len(longer)))
    size = d.connector._scheduler.direct.order.full.tokens_per_block
    assert d.counted["direct_landed_tokens"] - landed == cached - TOKENS // size * size


def test_each_group_counts(p: PrefillEngine, d: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: zeros in what one group has landed change the answer."""
    kind, order = land_kind(d), d.connector._scheduler.direct.order
    truth = p.ask("generate", prompt(3, TOKENS), ANSWER)
    cache, parts = kind._cache, order.parts(TOKENS)
    assert len(parts) > 1
    for part in parts:

        def empty(landed: Any, count: int, part: Any = part) -> None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            caches: dict[str, Any] = get_kv_transfer_group()._kv_caches  # pyright: ignore
            blocks = (landed.local + landed.taken)[part.place : part.end_place]
            for name in part.group.layer_names:
                for tensor in caches[name] if isinstance(caches[name], list | tuple) else [caches[name]]:
                    for block in blocks:
                        tensor[block.block_id] = 0
            cache(landed, count)

        monkeypatch.setattr(kind, "_cache", empty)
        assert d.llm.reset_prefix_cache()
        p.ask("prefill", prompt(3, TOKENS), {"do_remote_decode": True})
        got, cached = answer(d, d.add(prompt(3, TOKENS), ANSWER, p.ask("finish")))
        assert cached == order.tokens(TOKENS)
        assert got != truth, f"group {part.group.index} does not count"
    monkeypatch.undo()
    assert d.llm.reset_prefix_cache()
    p.ask("prefill", prompt(3, TOKENS), {"do_remote_decode": True})
    assert answer(d, d.add(prompt(3, TOKENS), ANSWER, p.ask("finish")))[0] == truth


def test_an_engine_that_dies_leaves_a_prompt_of_which_nothing_is_used(
    p: PrefillEngine, d: InProcessEngine
) -> None:
    """The last test of a family: it kills P."""
    asked = prompt(4, TOKENS)
    truth = p.ask("generate", asked, ANSWER)
    own, landed = d.books(), d.counted["direct_landed"]
    for_p, for_d = both_params(p)
    p.ask("prefill", asked, for_p)
    name = d.add(asked, ANSWER, for_d)
    assert p.ask("step")
    step_until(d, "the first blocks land", lambda: landed_blocks(d) > 0)
    p.kill()
    assert answer(d, name) == (truth, 0)
    assert d.counted["direct_landed"] == landed
    d.generate(prompt(99, 40), 1)
    assert d.books() == own and d.errors() == 0
