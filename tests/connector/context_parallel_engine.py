"""A vLLM whose two ranks share the tokens of each block (decode context parallelism), with all its processes. Asks
prompts one after the other, each time with its own prefix cache emptied; prints one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

from context_parallel_on_cpu import SPOIL, SPOILS
from engine import BLOCK, ENVIRONMENT, connector, wait_until_old

RANKS = 2
ANSWER = 12
ATTEMPTS = 5
# Of whole blocks, of parts of a block, shorter than one; the last ones begin as the first does.
LENGTHS = (256, 193, 70, 319, 50)
BEGIN = 150


def prompts() -> list[list[int]]:
    source = random.Random(3)
    made = [[source.randrange(3, 2000) for _ in range(length)] for length in LENGTHS]
    return [*made, made[0][:BEGIN] + made[1], made[0][:BEGIN]]


def found() -> list[int]:
    """Tokens of each prompt that are cached once all is stored: all whole blocks, but never a prompt's last token."""
    block = BLOCK * RANKS
    whole = [len(each) // block * block for each in prompts()]
    return [tokens - (tokens == len(each)) for tokens, each in zip(whole, prompts(), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--interleave", type=int, required=True)
    parser.add_argument("--once", action="store_true", help="ask each prompt once")
    parser.add_argument("--spoil", nargs="*", choices=SPOILS, default=[], help="one more round for each")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    print("RESULT " + json.dumps(run(arguments)), flush=True)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from vllm import LLM

    from kvlane import _core

    wait_until_old(Path(arguments.model))
    engine = LLM(
        arguments.model,
        dtype="float32",
        max_model_len=1024,
        block_size=BLOCK,
        enforce_eager=True,
        num_gpu_blocks_override=200,
        tensor_parallel_size=RANKS,
        decode_context_parallel_size=RANKS,
        cp_kv_cache_interleave_size=arguments.interleave,
        enable_prefix_caching=True,
        # With two ranks on two cores a lookup took more than the usual 250 ms.
        kv_transfer_config=connector(arguments.address, {"kvlane.lookup_timeout_ms": 60_000}),  # pyright: ignore
    )
    tool = _core.Tool(arguments.address, 60_000.0)
    cold = warm = ask(engine, tool)
    # Spinning ranks can keep a daemon from answering for a minute. Then a save is given up, or a lookup is a miss.
    for _ in range(ATTEMPTS if not arguments.once else 0):
        warm = ask(engine, tool)
        if warm["cached"] == found():
            break
    spoilt = []
    for spoil in arguments.spoil:
        Path(os.environ[SPOIL]).write_text(spoil)
        spoilt.append(ask(engine, tool))
    tool.close()
    return {"cold": cold, "warm": warm, "spoilt": spoilt}


def ask(engine: Any, tool: Any) -> dict[str, Any]:
    """Answers, and how much of each prompt was cached. Afterwards all is saved, and the engine's own cache is empty."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    outputs = [
        engine.generate([{"prompt_token_ids": each}], parameters, use_tqdm=False)[0] for each in prompts()
    ]
    assert engine.reset_prefix_cache()
    tool.settle(60_000)
    return {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }


if __name__ == "__main__":
    main()
