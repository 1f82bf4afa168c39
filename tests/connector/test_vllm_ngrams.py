"""A drafter that looks up n-grams, and a model with windows. Part of `make soak`.

In a process of its own: with the modules that this drafter imports, vLLM starts no further engine there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from direct_pair import DIRECT, answer, both_params
from engine import BLOCK, InProcessEngine, prompt, wait_until_ready
from prefill_engine import CHUNK, PrefillEngine
from stores import DaemonStore
from test_vllm_direct_drafter import DRAFTER, drafted
from test_vllm_families import options

from kvlane.demo.model import build_family

pytestmark = pytest.mark.soak
ANSWER = 48


def test_prompts_come_from_the_store_and_from_another_engine(
    store: DaemonStore, nobody: str, runtime_folder: None, tmp_path: Path
) -> None:
    path = build_family(tmp_path / "gemma3", "gemma3")
    more = {"speculative_config": DRAFTER, "max_num_batched_tokens": CHUNK, **options("gemma3")}
    p = PrefillEngine(path, nobody, DIRECT, **more)
    d = InProcessEngine(path, store.address, extra=DIRECT, **more)
    try:
        wait_until_ready(d)
        for tokens in (470, 385, 97):
            hit = (tokens - 1) // BLOCK * BLOCK
            stored, handed_over = prompt(tokens, tokens), prompt(f"{tokens} handed over", tokens)
            truth = p.ask("generate", stored, ANSWER)
            before = drafted(d)
            assert d.generate(stored, ANSWER) == (truth, 0)
            assert drafted(d) > before
            store.settle()
            d.forget()
            assert d.generate(stored, ANSWER) == (truth, hit)

            truth, books = p.ask("generate", handed_over, ANSWER), d.books()
            for_p, for_d = both_params(p)
            p.ask("prefill", handed_over, for_p)
            name = d.add(handed_over, ANSWER, for_d)
            p.ask("finish")
            assert answer(d, name) == (truth, hit)
            d.drain()
            assert d.books() == books
        assert d.counted["direct_fallbacks"] == 0
        assert d.errors() == 0
    finally:
        d.close()
        p.close()
