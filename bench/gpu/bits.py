"""Engines of one kind on one GPU: do they compute the same bytes, and what are answers from another's blocks?

    python bench/gpu/bits.py --shape mla --out out/bits
    TORCHINDUCTOR_DETERMINISTIC=1 python bench/gpu/bits.py --shape mla --out out/bits-deterministic

Each engine compiles its code in folders of its own. So each may choose other kernels by its own timing, as two ranks
may that compile at the same time. The last engine does not compile: it runs the model eagerly (with `--eager`, it is
the one that compiles), and its bytes are others. The script compares the bytes of all blocks with the first engine's,
and the first engine's answers from its own blocks with those from blocks that it loaded of each other engine. It counts
the kernels that PyTorch's compiler chose by time, and those for which an engine's choice is not the first one's.

Controls: each prompt has its own answer; the first engine computes the same twice; answers from its own blocks, loaded,
are those from kept ones, in GPU memory; all loads found tokens; blocks of the last engine differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from operator import ne
from pathlib import Path
from typing import Any

import model
from measure import POISON, Engine, compared_tokens, differ_at, start
from provenance import add_arguments, head, public
from systems import ENVIRONMENT, SYSTEMS, kvlane_address, running

from kvlane.bench import report

HERE = Path(__file__).resolve().parent
TOKENS = 16
# Facts that have to be true for the comparison to count.
CONTROLS = (
    "control_distinct",
    "control_same_again",
    "control_own_blocks",
    "control_loaded",
    "control_other_bytes",
)


async def measure(engines: list[Engine], address: str, settings: argparse.Namespace) -> dict[str, Any]:
    """What the script's description names."""
    source = random.Random(11)
    vocabulary = model.SHAPES[settings.shape]["vocab_size"]
    prompts = [
        [source.randrange(100, vocabulary) for _ in range(compared_tokens(settings.tokens))]
        for _ in range(settings.prompts)
    ]
    first, *others = engines
    fresh, kept, computed, found = await compute(first, prompts, address, settings)
    by_engine = []
    for other in others:
        _, its_kept, its_computed, _ = await compute(other, prompts, address, settings)
        # The pool holds what the other engine computed.
        answers, tokens = await ask(first, prompts)
        await first.forget()
        by_engine.append(
            {
                "blocks_that_differ": sum(map(ne, computed, its_computed)),
                "own_answers_differ_at": differ_at(kept, its_kept),
                "answers_from_its_blocks_differ_at": differ_at(kept, answers),
                "loaded_tokens": tokens,
            }
        )
    again, _, _, found_again = await compute(first, prompts, address, settings)
    from_own, tokens_of_own = await ask(first, prompts)
    loaded = [count for each in by_engine for count in each["loaded_tokens"]]
    return {
        "blocks": len(computed),
        "by_engine": by_engine,
        "control_distinct": len(set(kept)) == len(kept),
        "control_same_again": again == fresh,
        "control_own_blocks": from_own == kept,
        "control_loaded": min(loaded + tokens_of_own) > 0 and not any(found + found_again),
        "control_other_bytes": by_engine[-1]["blocks_that_differ"] > 0,
    }


Answers = list[tuple[int, ...]]


async def compute(
    engine: Engine, prompts: list[list[int]], address: str, settings: argparse.Namespace
) -> tuple[Answers, Answers, list[Any], list[int]]:
    """Has an engine compute and save the prompts, and then forget them. Returns its answers, those from blocks kept in
    GPU memory, hashes of the blocks, and how many tokens of each prompt the engine did not compute at first."""
    drop(address)
    await engine.on_workers(model.redraw_weights, model.DEVIATION[settings.shape])
    await engine.on_workers(model.poison, POISON)
    fresh, found = await ask(engine, prompts)
    kept, _ = await ask(engine, prompts)
    computed = (await engine.on_workers(model.block_hashes, POISON))[0]
    await engine.forget()
    return fresh, kept, computed, found


async def ask(engine: Engine, prompts: list[list[int]]) -> tuple[Answers, list[int]]:
    """The answers, and how many tokens of each prompt the engine did not compute."""
    answers, cached = [], []
    for prompt in prompts:
        answers.append((await engine.answer(prompt, TOKENS))[1])
        cached.append(engine.cached_tokens)
    return answers, cached


def choices(folders: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """What PyTorch's compiler chose by time, by a hash of the kernel's source: tile sizes, warps and stages."""
    files = [file for folder in folders for file in folder.rglob("*.best_config")]
    read = {file.stem: json.loads(file.read_text()) for file in files}
    own = ("time_taken_ms", "triton_cache_hash")
    return {
        source: {name: value for name, value in chosen.items() if name not in own}
        for source, chosen in read.items()
    }


def count_choices(found: dict[str, Any], folder: Path) -> None:
    """Adds how many choices the first engine's compiler made, and how many are others in each other engine."""
    # vLLM moves PyTorch's folder into its own where it compiles ahead of time, as with torch 2.10 and newer.
    first, *others = [
        choices(folder.glob(f"*-{number + 1}")) for number in range(len(found["by_engine"]) + 1)
    ]
    found["choices"] = len(first)
    for its, other in zip(found["by_engine"], others, strict=True):
        its["choices_that_differ"] = sum(
            other[source] != first[source] for source in first.keys() & other.keys()
        )


def drop(address: str) -> None:
    """Drops all that the daemon holds."""
    told = subprocess.run(
        ["kvlane", "status", "--json", "--addr", address], capture_output=True, check=True, text=True
    )
    for namespace in json.loads(told.stdout)["namespaces"]:
        subprocess.run(
            ["kvlane", "drop", namespace["namespace"], "--addr", address], check=True, capture_output=True
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="mla")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--engines", type=int, default=3, help="of the same mode, besides the last one")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=10_000, help="of a prompt, about (default %(default)s)")
    parser.add_argument("--cache-bytes", type=int, default=16_000_000_000)
    parser.add_argument("--kv-cache-bytes", type=int, default=16_000_000_000, help="of each engine")
    parser.add_argument("--gpu-memory", type=float, default=0.2, help="share that is free at each start")
    parser.add_argument("--out", type=Path, default=Path("out/bits"))
    add_arguments(parser)
    settings = parser.parse_args()
    result = head("gpu bits", settings)
    settings.tensor_parallel, settings.new_tokens = 1, 0
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    settings.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder, settings.scratch = Path(scratch), scratch
        settings.connector = SYSTEMS["kvlane"].connector(settings.cache_bytes, folder)
        model.write_config(settings.shape, folder)
        with running(SYSTEMS["kvlane"], settings.cache_bytes, folder, settings.out / "daemon.log"):
            engines = []
            try:
                for number, eager in enumerate([settings.eager] * settings.engines + [not settings.eager], 1):
                    # PyTorch's compiler has a folder of its own, which it shares among all engines of a user.
                    for variable in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                        os.environ[variable] = str(folder / f"{variable.lower()}-{number}")
                    engines.append(start(argparse.Namespace(**vars(settings) | {"eager": eager}))[0])
                    report.say(f"    engine {number} of {settings.engines + 1} is up")
                found = asyncio.run(measure(engines, kvlane_address(folder), settings))
                count_choices(found, folder)
            finally:
                for engine in engines:
                    engine.shutdown()
    result |= {
        "settings": public(settings, ["connector"]),
        "deterministic_inductor": os.environ.get("TORCHINDUCTOR_DETERMINISTIC", "0"),
        "machine": report.machine_facts(),
        "found": found,
    }
    report.write_json(settings.out / "bits.json", result)
    for name, value in found.items():
        print(f"{name}: {value}")
    return 0 if all(found[name] for name in CONTROLS) else 1


if __name__ == "__main__":
    # A script that is terminated ends its engines and the daemon.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
