"""An unmodified vLLM in a process of its own, told what to do by JSON lines on stdin.

The demo needs engines that it can look into (the bytes of a block) and kill with SIGKILL, so each is a process
around an in-process vLLM `LLM`. Every command is one line `{"id": 1, "op": "generate", ...}` and gets one line
`{"id": 1, "ok": true, ...}` or `{"id": 1, "ok": false, "error": "..."}`; between them come event lines.

| op | arguments | answer |
|---|---|---|
| generate | prompts: lists of token ids, tokens: to generate | answers: see `_Engine.generate` |
| drain | | steps the engine until the connector has nothing left to save |
| reset_prefix_cache | | reset: false while blocks are still in use |
| blocks | prompt: token ids | blocks: see `_Engine.blocks` |
| metrics | | counters: of vLLM by name; external_hits: tokens that the connector gave |
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from typing import Any, TextIO

# Bytes of each layer that identify a block in the pool.
FINGERPRINT_BYTES = 64


class _Engine:
    def __init__(self, settings: argparse.Namespace, events: TextIO) -> None:
        from vllm import LLM, SamplingParams

        options: dict[str, Any] = {}
        if settings.device == "cuda":
            # The cache has a size of its own. This share must be free at the start, beside another engine. Steps are
            # requested one by one, so none is planned ahead.
            options |= {"gpu_memory_utilization": 0.3, "async_scheduling": False}
        if settings.connector:
            options["kv_transfer_config"] = json.loads(settings.connector)
        self._sampling = SamplingParams
        self._events = events
        self._next_request = 0
        self._llm = LLM(
            model=settings.model,
            dtype=settings.dtype,
            block_size=settings.block_size,
            max_model_len=settings.max_tokens,
            max_num_batched_tokens=settings.max_tokens,
            max_num_seqs=8,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=settings.kv_cache_bytes,
            enforce_eager=True,
            disable_log_stats=False,
            seed=0,
            **options,
        )
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._external_hits = 0
        self._count_external_hits()

    def _count_external_hits(self) -> None:
        """Counts external hits where vLLM makes its numbers. Before 0.30 those of steps without an output reach no
        counter, and the step that starts a load is one of them."""
        make_stats = self._core.scheduler.make_stats

        def make_and_count(*arguments: Any, **named: Any) -> Any:
            stats = make_stats(*arguments, **named)
            external = getattr(stats, "connector_prefix_cache_stats", None)
            self._external_hits += external.hits if external is not None else 0
            return stats

        self._core.scheduler.make_stats = make_and_count

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """Answer all prompts together, greedily.

        Each answer has `tokens`, `logprobs` (of the generated tokens), `ttft_ms`, `total_ms` (both from the moment
        when the prompts were handed over) and `cached_tokens` (own prefix cache and connector together).
        """
        sampling = self._sampling(
            temperature=0.0, max_tokens=command["tokens"], ignore_eos=True, logprobs=1, detokenize=False
        )
        started = time.perf_counter()
        positions = {}
        for position, prompt in enumerate(command["prompts"]):
            self._next_request += 1
            name = f"demo-{self._next_request}"
            positions[name] = position
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        answers: list[dict[str, Any]] = [{} for _ in positions]
        waiting = len(positions)
        while waiting:
            for output in self._engine.step():
                now_ms = (time.perf_counter() - started) * 1e3
                answer = answers[positions[output.request_id]]
                if "ttft_ms" not in answer:
                    answer["ttft_ms"] = now_ms
                    self._events.write(json.dumps({"id": command["id"], "event": "first_token"}) + "\n")
                if output.finished:
                    completion = output.outputs[0]
                    answer["tokens"] = list(completion.token_ids)
                    answer["logprobs"] = [
                        step[token].logprob
                        for token, step in zip(completion.token_ids, completion.logprobs, strict=True)
                    ]
                    answer["total_ms"] = now_ms
                    answer["cached_tokens"] = output.num_cached_tokens or 0
                    waiting -= 1
        return {"answers": answers}

    def drain(self, _: dict[str, Any]) -> dict[str, Any]:
        scheduler = self._core.scheduler
        while scheduler.has_requests():
            self._engine.step()
        return {}

    def reset_prefix_cache(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"reset": bool(self._llm.reset_prefix_cache())}

    def blocks(self, command: dict[str, Any]) -> dict[str, Any]:
        """The prompt's blocks that this engine has in its own prefix cache, from the first on.

        Each has `digest` (of the bytes of all layers), `layers` (the first bytes of each layer, hex) and `layer_bytes`
        (bytes of one layer).
        """
        from vllm.v1.request import Request

        request = Request(
            request_id="blocks",
            prompt_token_ids=command["prompt"],
            sampling_params=self._sampling(max_tokens=1),
            pooling_params=None,
            block_hasher=self._core.request_block_hasher,
        )
        block_pool = self._core.scheduler.kv_cache_manager.block_pool
        layers = self._engine.model_executor.driver_worker.worker.model_runner.kv_caches
        blocks = []
        for block_hash in request.block_hashes:
            cached = block_pool.get_cached_block(block_hash, [0])
            if cached is None:
                break
            digest = hashlib.sha256()
            heads = []
            content = b""
            for layer in layers:
                block = layer[cached[0].block_id].cpu().contiguous().flatten()
                content = block.view(_bytes_dtype()).numpy().tobytes()
                digest.update(content)
                heads.append(content[:FINGERPRINT_BYTES].hex())
            blocks.append({"digest": digest.hexdigest(), "layers": heads, "layer_bytes": len(content)})
        return {"blocks": blocks}

    def metrics(self, _: dict[str, Any]) -> dict[str, Any]:
        counters: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                counters[metric.name] = counters.get(metric.name, 0) + value
        return {"counters": counters, "external_hits": self._external_hits}


def _bytes_dtype() -> Any:
    import torch

    return torch.uint8


def main() -> None:
    """Start the engine, say `{"event": "ready"}`, obey until stdin ends."""
    parser = argparse.ArgumentParser(description="One vLLM engine of the demo; commands on stdin.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--connector", help="kv_transfer_config as JSON; without it plain vLLM")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what this vLLM is for")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument(
        "--dtype", default="float32", help="vLLM's auto would turn float32 weights to bfloat16"
    )
    parser.add_argument("--max-tokens", type=int, default=2560, help="longest prompt and answer together")
    parser.add_argument("--kv-cache-bytes", type=int, default=1 << 30)
    settings = parser.parse_args()

    # vLLM and its libraries write to stdout; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = _Engine(settings, answers)
    answers.write(json.dumps({"event": "ready"}) + "\n")
    operations = {
        "generate": engine.generate,
        "drain": engine.drain,
        "reset_prefix_cache": engine.reset_prefix_cache,
        "blocks": engine.blocks,
        "metrics": engine.metrics,
    }
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {"id": command["id"], "ok": True}
        try:
            answer.update(operations[command["op"]](command))
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises belongs to the one who asked
            answer.update({"ok": False, "error": f"{type(error).__name__}: {error}"})
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
