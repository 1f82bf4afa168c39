"""A model with latent attention (MLA), by one GPU and by several: what the pool holds of it, and over which links it
comes back.

    python bench/gpu/mla.py --tensor-parallel 4 --out out/mla

Every rank of such a model holds the same bytes. They are to take as much room as those of one GPU, and each rank's link
is to bring its share. Controls as in `measure.py`: each prompt has its own answer, and answers with loaded and kept
blocks are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import model
from measure import Engine, start, summary
from provenance import add_arguments, head, public
from systems import SYSTEMS, kvlane_address

from kvlane.bench import report

HERE = Path(__file__).resolve().parent
PATIENCE_S = 120.0


class Daemon:
    """A daemon and its metrics."""

    def __init__(self, http: str) -> None:
        self._url = f"http://{http}/metrics"

    def metrics(self) -> dict[str, float]:
        """Values by name and labels."""
        with urllib.request.urlopen(self._url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def by_link(self) -> dict[str, float]:
        """Bytes that each GPU's link brought so far."""
        found = self.metrics().items()
        return {name: value for name, value in found if name.startswith("kvlane_loaded_by_link_bytes_total")}


@contextmanager
def daemon(settings: argparse.Namespace, folder: Path) -> Iterator[Daemon]:
    """One that loads may use all links of."""
    command = ["kvlane", "serve", "--pool-size", str(settings.cache_bytes), "--rails", "auto"]
    command += ["--listen", kvlane_address(folder), "--http", settings.http]
    with (settings.out / "daemon.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        end = time.monotonic() + PATIENCE_S
        while not SYSTEMS["kvlane"].is_up(folder):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the daemon does not start; see {settings.out / 'daemon.log'}")
            time.sleep(0.1)
        yield Daemon(settings.http)
    finally:
        process.terminate()
        process.wait()


async def measure(engine: Engine, watched: Daemon, settings: argparse.Namespace) -> dict[str, Any]:
    """Cold, hits in GPU memory, and loads; the pool's bytes, and those of each link."""
    await engine.on_workers(model.redraw_weights, model.DEVIATION["mla"])
    source = random.Random(7)
    vocabulary = model.SHAPES["mla"]["vocab_size"]
    prompts = [
        [source.randrange(100, vocabulary) for _ in range(settings.tokens)] for _ in range(settings.prompts)
    ]
    cold = [await engine.ttft(prompt) for prompt in prompts]
    kept = [(await engine.answer(prompt, 16))[1] for prompt in prompts]
    in_gpu = [await engine.ttft(prompt) for prompt in prompts]
    await engine.forget()
    metrics = watched.metrics()
    before = watched.by_link()
    warm = [await engine.ttft(prompt) for prompt in prompts]
    links = {name: value - before.get(name, 0) for name, value in watched.by_link().items()}
    await engine.forget()
    back = [(await engine.answer(prompt, 16))[1] for prompt in prompts]
    return {
        "cold": summary(cold),
        "in_gpu": summary(in_gpu),
        "warm": summary(warm),
        "pool_used_bytes": metrics["kvlane_pool_used_bytes"],
        "blocks": metrics["kvlane_blocks"],
        "loaded_by_link_bytes": links,
        "same_tokens": back == kept,
        "control_distinct": len(set(kept)) == len(kept),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--cache-bytes", type=int, default=16_000_000_000)
    parser.add_argument("--kv-cache-bytes", type=int, default=8_000_000_000, help="of each GPU")
    parser.add_argument("--gpu-memory", type=float, default=0.3)
    parser.add_argument("--http", default="127.0.0.1:9093", help="of the daemon")
    parser.add_argument("--out", type=Path, default=Path("out/mla"))
    add_arguments(parser)
    settings = parser.parse_args()
    result = head("gpu mla", settings)
    settings.shape, settings.new_tokens = "mla", 0
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    settings.out.mkdir(parents=True, exist_ok=True)
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder, settings.scratch = Path(scratch), scratch
        settings.connector = SYSTEMS["kvlane"].connector(settings.cache_bytes, folder)
        for ranks in (1, settings.tensor_parallel):
            with daemon(settings, folder) as watched:
                engine, _ = start(argparse.Namespace(**vars(settings) | {"tensor_parallel": ranks}))
                try:
                    found[ranks] = asyncio.run(measure(engine, watched, settings))
                finally:
                    engine.shutdown()
            report.say(f"    {ranks} GPUs: {found[ranks]}")
    one, several = found[1], found[settings.tensor_parallel]
    loaded = sum(several["loaded_by_link_bytes"].values())
    shares = {
        name: round(value / loaded, 3) if loaded else 0.0
        for name, value in several["loaded_by_link_bytes"].items()
    }
    ratio = several["pool_used_bytes"] / one["pool_used_bytes"]
    result |= {
        "settings": public(settings, ["connector"]),
        "machine": report.machine_facts(),
        "found": {str(ranks): parts for ranks, parts in found.items()},
        "pool_bytes_to_one_gpu": round(ratio, 4),
        "share_by_link": shares,
    }
    report.write_json(settings.out / "mla.json", result)
    print(f"pool bytes: {ratio:.3f} of one GPU's; links: {shares}; TTFT warm {several['warm']['p50']:.1f} ms")
    held = all(parts["same_tokens"] and parts["control_distinct"] for parts in found.values())
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
