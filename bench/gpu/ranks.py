"""Two tensor-parallel ranks with latent attention: do they compute the same bytes, and what decides it?

    python bench/gpu/ranks.py --prompts 3 --out out/ranks

Each rank computes the whole latent cache from the same input. So bytes differ only if the ranks run other code: each
compiles for itself, in folders of its own, as ranks on one GPU (`one_gpu.py`). All engines start at the same time, so
PyTorch's compiler times kernels while others use the GPU.

| way | PyTorch's compiler |
|---|---|
| usual | as vLLM sets it |
| alike | does not put kernels side by side into one, and so times no size of such a kernel (`measure.RANKS_ALIKE`) |
| deterministic | `TORCHINDUCTOR_DETERMINISTIC=1` |

For each engine the script counts the blocks and elements that differ between the ranks, by layer and by part of the
cache (latent, and the part with positions), and lists the kernels for which the two compilers chose other sizes.

Controls: each engine computes the same twice, and computed all of it.
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
from pathlib import Path
from typing import Any

import model
import one_gpu
from bits import choices
from measure import POISON, RANKS_ALIKE, Engine, compared_tokens, start
from provenance import add_arguments, head, public
from systems import ENVIRONMENT

from kvlane.bench import report

HERE = Path(__file__).resolve().parent
RANKS = 2
# vLLM's compilation config, and variables, of each way.
WAYS: dict[str, tuple[dict[str, Any] | None, dict[str, str]]] = {
    "usual": (None, {}),
    "alike": (RANKS_ALIKE, {}),
    "deterministic": (None, {"TORCHINDUCTOR_DETERMINISTIC": "1"}),
}
CONTROLS = ("control_same_again", "control_computed")


async def measure(engine: Engine, settings: argparse.Namespace) -> dict[str, Any]:
    """Computes the prompts twice, and compares the ranks' blocks."""
    await engine.on_workers(model.redraw_weights, model.DEVIATION[settings.shape])
    source = random.Random(5)
    vocabulary = model.SHAPES[settings.shape]["vocab_size"]
    prompts = [
        [source.randrange(100, vocabulary) for _ in range(compared_tokens(settings.tokens))]
        for _ in range(settings.prompts)
    ]
    cached: list[int] = []

    async def compute() -> list[set[tuple[int, ...]]]:
        await engine.forget()
        await engine.on_workers(model.poison, POISON)
        for prompt in prompts:
            await engine.ttft(prompt)
            cached.append(engine.cached_tokens)
        return [set(rank) for rank in await engine.on_workers(model.block_hashes, POISON)]

    first = await compute()
    files = await engine.on_workers(model.save_blocks, POISON, settings.scratch)
    again = await compute()
    found = compared(files, model.SHAPES[settings.shape])
    return found | {"control_same_again": first == again, "control_computed": not any(cached)}


def compared(files: list[list[str]], shape: dict[str, Any]) -> dict[str, Any]:
    """How the second rank's blocks differ from the first one's. `files`: of `model.save_blocks`, by rank and layer."""
    import numpy

    by_layer: list[int] = []
    by_part = {"latent": 0, "positions": 0}
    blocks: Any = None
    for one, other in zip(*files, strict=True):
        unlike = numpy.load(one) != numpy.load(other)
        by_layer.append(int(unlike.sum()))
        its_blocks = unlike.any(axis=1)
        blocks = its_blocks if blocks is None else blocks | its_blocks
        if latent := shape.get("kv_lora_rank"):
            tokens = unlike.reshape(-1, latent + shape["qk_rope_head_dim"])
            by_part["latent"] += int(tokens[:, :latent].sum())
            by_part["positions"] += int(tokens[:, latent:].sum())
    return {
        "blocks": len(blocks),
        "blocks_that_differ": int(blocks.sum()),
        "elements_that_differ_by_layer": by_layer,
        "elements_that_differ_by_part": by_part,
    }


def chosen(scratch: Path) -> dict[str, Any]:
    """How many kernels' sizes the first rank's compiler chose by time, and those of the kernels for which the other one
    chose otherwise."""
    first, other = [choices(scratch.glob(f"*-{rank}")) for rank in range(RANKS)]
    unlike = {
        kernel: [first[kernel], other[kernel]]
        for kernel in sorted(first.keys() & other.keys())
        if first[kernel] != other[kernel]
    }
    return {"choices": len(first), "choices_that_differ": unlike}


def one_engine(settings: argparse.Namespace) -> None:
    """Starts an engine of a way, measures, and writes what was found."""
    settings.compilation, variables = WAYS[settings.way]
    os.environ.update(variables)
    settings.connector, settings.new_tokens, settings.tensor_parallel = "", 0, RANKS
    name = settings.result.stem
    with tempfile.TemporaryDirectory(dir=settings.memory) as scratch:
        settings.scratch = scratch
        with one_gpu.other_ranks(settings, RANKS) as those:
            engine, seconds = start(those)
            report.say(f"    {name}: the engine is up after {seconds:.0f} s")
            try:
                found = asyncio.run(measure(engine, those))
            finally:
                engine.shutdown()
        found |= chosen(Path(scratch))
    settings.result.write_text(json.dumps({"way": settings.way} | found))
    report.say(f"    {name}: {found['blocks_that_differ']} of {found['blocks']} blocks differ")


def all_engines(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """What was found of each engine that was done in time. Each runs this script in a process of its own."""
    files = [settings.out / f"{number}-{way}.json" for number, way in enumerate(settings.ways, 1)]
    processes = []
    with tempfile.TemporaryDirectory() as scratch, one_gpu.side_by_side(Path(scratch)):
        try:
            for file, way in zip(files, settings.ways, strict=True):
                file.unlink(missing_ok=True)
                command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--result", str(file)]
                with file.with_suffix(".log").open("wb") as log:
                    processes.append(subprocess.Popen(command, stderr=log, start_new_session=True))
            for process in processes:
                process.wait(settings.patience)
        except subprocess.TimeoutExpired:
            report.say("    not all engines were done in time")
        finally:
            end(processes)
    return [json.loads(file.read_text()) for file in files if file.exists()]


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        os.killpg(process.pid, signal.SIGTERM)
    for process in running:
        try:
            process.wait(one_gpu.ENDING_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="mla")
    parser.add_argument(
        "--ways", nargs="+", choices=sorted(WAYS), default=["usual", "usual", "alike", "deterministic"]
    )
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=10_000, help="of a prompt, about (default %(default)s)")
    parser.add_argument("--kv-cache-bytes", type=int, default=2_500_000_000, help="of each rank")
    parser.add_argument("--gpu-memory", type=float, default=0.08, help="share that is free at each start")
    parser.add_argument(
        "--memory", type=Path, default=Path("/tmp"), help="folder for the ranks' blocks (default %(default)s)"
    )
    parser.add_argument("--patience", type=float, default=400.0, help="seconds for all (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/ranks"))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    add_arguments(parser)
    settings = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if settings.way:
        one_engine(settings)
        return 0
    result = head("gpu ranks", settings)
    settings.out.mkdir(parents=True, exist_ok=True)
    found = all_engines(settings)
    result |= {
        "settings": public(settings, ["way", "result"]),
        "machine": report.machine_facts(),
        "found": found,
    }
    report.write_json(settings.out / "ranks.json", result)
    print(table(found))
    complete = len(found) == len(settings.ways)
    return 0 if complete and all(each[name] for each in found for name in CONTROLS) else 1


def table(found: list[dict[str, Any]]) -> str:
    """An engine a line."""
    heads = (
        "way",
        "blocks that differ",
        "elements",
        "kernels timed",
        "others in rank 1",
        "controls that fail",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for each in found:
        cells = [
            each["way"],
            f"{each['blocks_that_differ']} of {each['blocks']}",
            sum(each["elements_that_differ_by_layer"]),
            each["choices"],
            len(each["choices_that_differ"]),
            ", ".join(name for name in CONTROLS if not each[name]) or "none",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    # A script that is terminated ends its engines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
