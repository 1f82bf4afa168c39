"""The sharing benchmark with a real vLLM: hit rate and mean time to first token.

One vLLM takes the place of all engines, one after the other. Its own prefix cache is emptied before each request, so
only the daemon remembers. For the isolated pools it runs the requests of one engine after those of another, with a
fresh daemon for each. Isolated engines do not affect each other, so their order does not matter.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from typing import Any

from kvlane.bench import daemon, report, trace, vllm_process
from kvlane.bench.extra import tqdm
from kvlane.bench.figures import Figure
from kvlane.bench.vllm_process import TOKENS_PER_BLOCK, VllmProcess

NOTE = "vLLM: a tiny model, one request at a time, TTFT inside the process."
_SYSTEM_PROMPTS = 24
_SYSTEM_BLOCKS, _USER_BLOCKS = (16, 56), (1, 8)
# The tiny model has 4 layers, keys and values, 4 heads of 32 float32.
_BLOCK_BYTES = TOKENS_PER_BLOCK * 4 * 2 * 4 * 32 * 4
_VOCABULARY = (100, 32_000)
_CONNECT_TRIES = 200


def measure(arguments: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    """Hit rate and TTFT, shared and isolated, of the same requests."""
    shape = trace.Shape(
        _SYSTEM_PROMPTS, arguments.vllm_requests, arguments.zipf, _SYSTEM_BLOCKS, _USER_BLOCKS
    )
    made = trace.make(shape, arguments.seed)
    blocks = int(made.system_blocks * arguments.pool_share)
    model = vllm_process.tiny_model(arguments.out)
    with tempfile.TemporaryDirectory(prefix="kvlane-") as folder:
        address = f"unix:{folder}/kvlane.sock"
        log = arguments.out / "share-logs" / "vllm.log"
        with vllm_process.running(model, log, connector=vllm_process.connector(address), threads=2) as engine:
            shared = _phase(engine, address, blocks, made.requests, "vLLM, shared")
            isolated: list[dict[str, Any]] = []
            for number in range(arguments.engines):
                mine = made.requests[number :: arguments.engines]
                isolated += _phase(
                    engine, address, blocks // arguments.engines, mine, f"vLLM, isolated {number + 1}"
                )
    rates = {name: _rate(answers) for name, answers in (("shared", shared), ("isolated", isolated))}
    ttft = {
        name: report.summary(answer["ttft_ms"] for answer in answers)
        for name, answers in (("shared", shared), ("isolated", isolated))
    }
    figures = [
        Figure("vLLM: hit rate, one shared pool", rates["shared"] * 100, "%"),
        Figure(f"vLLM: hit rate, {arguments.engines} isolated pools", rates["isolated"] * 100, "%"),
        Figure("vLLM: shared / isolated hit rate", rates["shared"] / rates["isolated"]),
        Figure("vLLM: mean TTFT, one shared pool", ttft["shared"]["mean"], "ms"),
        Figure("vLLM: mean TTFT, isolated pools", ttft["isolated"]["mean"], "ms"),
    ]
    return figures, {"hit_rate": rates, "ttft_ms": ttft, "pool_blocks": blocks}


def _rate(answers: list[dict[str, Any]]) -> float:
    return sum(answer["cached_tokens"] for answer in answers) / sum(
        answer["tokens_asked"] for answer in answers
    )


def _phase(
    engine: VllmProcess, address: str, blocks: int, requests: list[trace.Request], name: str
) -> list[dict[str, Any]]:
    """Runs the requests over a fresh daemon of that many blocks, and returns the answers."""
    answers = []
    with daemon.running(blocks * _BLOCK_BYTES, "--scrub-rate", "0", address=address) as serve:
        _connect(engine, serve)
        for request in tqdm(requests, desc=name, unit="request", leave=False):
            prompt = _tokens(f"system {request.system_prompt}", request.system_blocks * TOKENS_PER_BLOCK)
            # One token more: the last one is never taken from a cache.
            prompt += _tokens(f"user {request.number}", request.user_blocks * TOKENS_PER_BLOCK + 1)
            answer = _generate(engine, serve, prompt)
            answers.append(answer | {"tokens_asked": len(prompt)})
    return answers


def _connect(engine: VllmProcess, serve: daemon.Daemon) -> None:
    """Waits until the engine has found the daemon, so that its next blocks are saved."""
    for number in range(_CONNECT_TRIES):
        prompt = _tokens(f"connect {serve.pid} {number}", 4 * TOKENS_PER_BLOCK + 1)
        _generate(engine, serve, prompt)
        if _generate(engine, serve, prompt)["cached_tokens"]:
            return
    raise AssertionError("the engine did not find the daemon")


def _generate(engine: VllmProcess, serve: daemon.Daemon, prompt: list[int]) -> dict[str, Any]:
    answer = engine.ask("generate", prompts=[prompt], tokens=1)["answers"][0]
    engine.ask("drain")
    serve.settle()
    assert engine.ask("reset_prefix_cache")["reset"], "the engine's own prefix cache could not be emptied"
    return answer


def _tokens(name: str, count: int) -> list[int]:
    source = random.Random(name)
    return [source.randrange(*_VOCABULARY) for _ in range(count)]
