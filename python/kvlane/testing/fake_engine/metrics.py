"""GET /metrics with vLLM's names, in Prometheus' text format."""

from __future__ import annotations

from dataclasses import dataclass

from kvlane.testing.fake_engine.model import EngineModel


@dataclass
class Counters:
    """Totals since the engine started."""

    prompt_tokens: int = 0
    generation_tokens: int = 0


def text(model: str, engine: EngineModel, counters: Counters, pool: str | None = None) -> bytes:
    """`pool` is the daemon's run and the space that kvlane's connector would name, with a slash between."""
    rows = [
        ("vllm:num_requests_running", "gauge", "Requests that have a seat.", engine.running),
        ("vllm:num_requests_waiting", "gauge", "Requests that wait for a seat or a prefill.", engine.waiting),
        ("vllm:kv_cache_usage_perc", "gauge", "Part of the blocks that running requests use.", engine.usage),
        ("vllm:prompt_tokens_total", "counter", "Prompt tokens of requests.", counters.prompt_tokens),
        ("vllm:generation_tokens_total", "counter", "Tokens generated.", counters.generation_tokens),
        ("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up.", engine.cache_queries),
        ("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found.", engine.cache_hits),
    ]
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = f'{{engine="0",model_name="{escaped}"}}'
    page = "".join(
        f"# HELP {name} {help_}\n# TYPE {name} {kind}\n{name}{labels} {float(value)}\n"
        for name, kind, help_, value in rows
    )
    if pool is not None:
        daemon, space = pool.split("/")
        named = f'{labels[:-1]},daemon="{daemon}",space="{space}"}}'
        page += f"# TYPE vllm:kvlane_pool_info gauge\nvllm:kvlane_pool_info{named} 1.0\n"
    return page.encode()
