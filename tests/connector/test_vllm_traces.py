"""The spans of a real vLLM's requests at a collector: what vLLM keeps of a request's trace reaches the daemon."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from collector import Collector, collecting, tree
from engine import BLOCK, InProcessEngine, engines, prompt
from stores import DaemonStore
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def generate(engine: InProcessEngine, tokens: list[int], name: str, traceparent: str) -> None:
    """As vLLM's server hands a request with this header to its engine, if it is told to export traces."""
    core: Any = engine.llm.llm_engine
    settings = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    core.add_request(name, {"prompt_token_ids": tokens}, settings, trace_headers={"traceparent": traceparent})
    while core.has_unfinished_requests():
        core.step()
    engine.drain()


def test_vllm_keeps_the_header_if_it_is_told_to_export_traces() -> None:
    """The page says so; vLLM's own server passes `trace_headers` on only with this flag."""
    arguments = AsyncEngineArgs(model="m", otlp_traces_endpoint="http://127.0.0.1:4317")
    assert arguments.otlp_traces_endpoint == "http://127.0.0.1:4317"
    source = inspect.getsource(AsyncLLM)
    assert "otlp_traces_endpoint is None" in source and "trace_headers = None" in source


def test_a_prompt_that_is_computed_and_one_that_is_loaded(
    model: Path, tmp_path: Path, collector: Collector
) -> None:
    store = DaemonStore(tmp_path, "--otlp-endpoint", collector.endpoint)
    try:
        with engines(store.address) as start:
            engine = start(model)
            tokens = prompt("traced", 6 * BLOCK)
            generate(engine, tokens, "cold", f"00-{TRACE}-{PARENT}-01")
            store.settle()
            engine.forget()
            generate(engine, tokens, "unsampled", f"00-{TRACE}-{'1' * 16}-00")
            engine.forget()
            generate(engine, tokens, "warm", f"00-{TRACE}-{'2' * 16}-01")
    finally:
        # The last spans go when the daemon stops.
        store.close()
    assert {span.trace for span in collector.spans} == {TRACE}
    of = {
        parent: [span for span in collector.spans if span.parent == parent]
        for parent in (PARENT, "1" * 16, "2" * 16)
    }
    assert sorted({span.name for span in of[PARENT]}) == ["kvlane.lookup", "kvlane.save"]
    saved = sum(span.attributes["kvlane.blocks"] for span in of[PARENT] if span.name == "kvlane.save")
    assert saved == 6, "the prompt's blocks; those of the answer were not looked up"
    assert of["1" * 16] == [], "its caller did not sample it"
    assert sorted(tree(of["2" * 16])[""]) == ["kvlane.load", "kvlane.lookup"]
    (lookup,) = [span for span in of["2" * 16] if span.name == "kvlane.lookup"]
    assert (lookup.attributes["kvlane.tier"], lookup.attributes["kvlane.hit_blocks.ram"]) == ("ram", 6)
