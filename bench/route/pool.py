"""First tokens at four engines that share a pool, by a router that knows of the pool and by one that does not.

    python bench/route/pool.py KVLANE [--out FOLDER]
    python bench/route/pool.py KVLANE --engine URL --engine URL ... --model NAME

KVLANE is the program. Without --engine the engines are simulated (`kvlane replay --route`), the same on every machine.
With it the engines are real ones that run kvlane's connector on one daemon: both routers take turns, so that the
machine's moods meet both. Prompts are drawn by Zipf's law, at 30 and at 80 % of what the engines serve. Writes
pool.json and pool.png.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from kvlane.bench.drawing import AT_LEAST, AT_MOST, Bar, Panel, Picture, number, save  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

LOADS = (0.3, 0.8)
GOALS = {0.3: 1.0, 0.8: 0.8}
PROMPTS, ZIPF, BLOCK = 40, 1.0, 512
# Words of a prompt for real engines.
WORDS = 3000
KNOWS, KNOWS_NOT = "knows of the pool", "does not"
# CPU engines take thirty times (prefill) and three times (decode) as long as an H100, and 4 ms to load 4,000 tokens.
FLEET = """policies = ["least-work"]
[[class]]
name = "cpu"
prefill-times = 30
decode-times = 3
kv-tokens = 60000
requests-max = {seats}
step-tokens = 2048
[[pool]]
name = "host"
load-token-ms = 0.001
told = {told}
[[node]]
count = 4
pool = "host"
[signals]
kv-events = {events}
"""


def drawn(chance: random.Random) -> int:
    """A prompt's number."""
    return chance.choices(range(PROMPTS), [1 / (rank + 1) ** ZIPF for rank in range(PROMPTS)])[0]


def trace(path: Path, requests: int, output: int) -> None:
    """Each prompt once, slowly, and then `requests` at one a second."""
    chance = random.Random(1)
    blocks = [chance.randint(4, 12) for _ in range(PROMPTS)]
    now = 0.0
    with path.open("w") as file:
        for count in range(PROMPTS + requests):
            is_first = count < PROMPTS
            now += 200.0 if is_first else chance.expovariate(1.0)
            prompt = count if is_first else drawn(chance)
            row = {
                "timestamp": int(now * 1000),
                "input_length": blocks[prompt] * BLOCK,
                "output_length": chance.randint(output // 2, output * 3 // 2),
                "hash_ids": [prompt * 100 + block for block in range(blocks[prompt])],
            }
            file.write(json.dumps(row) + "\n")


def replayed(program: str, file: Path, head: str, **keys: object) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as fleet:
        fleet.write(head + FLEET.format(**{name: str(value).lower() for name, value in keys.items()}))
        fleet.flush()
        command = [program, "replay", str(file), "--route", fleet.name, "--json"]
        return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def simulated(program: str) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for output, seats, events in ((100, 256, False), (100, 256, True), (100, 16, True), (30, 256, True)):
            file = Path(folder) / "trace.jsonl"
            keys = {"seats": seats, "events": events}
            trace(file, 10_000, output)
            most = replayed(program, file, "loads = [0.01]\n", told=True, **keys)[
                "capacity_requests_per_second"
            ]
            head = f"speeds = {[load * most for load in LOADS]}\n"
            found = {
                told: replayed(program, file, head, told=told, **keys)["results"] for told in (False, True)
            }
            for at, load in enumerate(LOADS):
                means = {KNOWS: found[True][at]["ttft_mean_ms"], KNOWS_NOT: found[False][at]["ttft_mean_ms"]}
                name = f"{output} tokens, {seats} seats, {'events' if events else 'texts'}"
                rows.append(
                    {"case": name, "load": load, "requests_per_second": load * most, "mean_ms": means}
                )
    return rows


@contextmanager
def router(program: str, engines: list[str], knows: bool) -> Iterator[str]:
    """A control names a pool of its own for each engine, which counts more than what the engines tell."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        for at, url in enumerate(engines):
            pool = "" if knows else f'pool = "alone-{at}"\n'
            file.write(f'[[node]]\nurl = "{url}"\nrole = "worker"\n{pool}')
        file.flush()
        flags = ["--config", file.name, "--listen", "127.0.0.1:0", "--admin", "off", "--socket", "off"]
        process = subprocess.Popen([program, "route", *flags], stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            address = ""
            ready = 0
            for line in process.stderr:
                seen = re.search(r"routes at http://(\S+?):? ", line)
                address = seen[1] if seen else address
                ready += "node ready" in line
                if address and ready == len(engines):
                    break
            threading.Thread(target=process.stderr.read, daemon=True).start()
            # Its engines' metrics are read every 2 s.
            time.sleep(3)
            yield address
        finally:
            process.terminate()
            process.wait()


def text_of(prompt: int) -> str:
    """Its words are tokens of the demo's model, and differ from the first one on."""
    return " ".join(f"w{4 + (997 * prompt + 13 * place) % 1900}" for place in range(WORDS))


def ask(address: str, model: str, prompt: int, output: int) -> float:
    """Seconds to the first byte of a streamed answer."""
    text = text_of(prompt)
    began = time.monotonic()
    connection = http.client.HTTPConnection(address, timeout=600)
    body = {"model": model, "prompt": text, "max_tokens": output, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.read(1)
    first = time.monotonic() - began
    answer.read()
    connection.close()
    return first


def driven(address: str, model: str, rate: float, requests: int, seed: int, output: int) -> list[float]:
    """Requests at a rate; infinite: all at once."""
    chance = random.Random(seed)
    firsts: list[float] = []
    threads = []
    for _ in range(requests):
        prompt = drawn(chance)
        thread = threading.Thread(target=lambda p=prompt: firsts.append(ask(address, model, p, output)))
        thread.start()
        threads.append(thread)
        time.sleep(chance.expovariate(rate) if rate < float("inf") else 0)
    for thread in threads:
        thread.join()
    assert len(firsts) == requests, "requests failed"
    return firsts


def real(program: str, engines: list[str], model: str, rounds: int, requests: int) -> list[dict[str, Any]]:
    output = 20
    with router(program, engines, knows=True) as address:
        for prompt in range(PROMPTS):
            ask(address, model, prompt, 1)
        began = time.monotonic()
        driven(address, model, float("inf"), requests, 0, output)
        most = requests / (time.monotonic() - began)
    rows = []
    for load in LOADS:
        firsts: dict[str, list[float]] = {KNOWS: [], KNOWS_NOT: []}
        for turn in range(rounds):
            for knows in (False, True) if turn % 2 else (True, False):
                with router(program, engines, knows) as address:
                    # A router that has just begun knows of no prompt yet.
                    for prompt in range(PROMPTS):
                        ask(address, model, prompt, 1)
                    name = KNOWS if knows else KNOWS_NOT
                    firsts[name] += driven(address, model, load * most, requests, turn, output)
        means = {name: statistics.mean(each) * 1000 for name, each in firsts.items()}
        rows.append({"case": model, "load": load, "requests_per_second": load * most, "mean_ms": means})
    return rows


def picture(found: dict[str, Any]) -> Picture:
    panels = []
    for load in LOADS:
        bars = []
        for row in (row for row in found["rows"] if row["load"] == load):
            ratio = row["mean_ms"][KNOWS] / row["mean_ms"][KNOWS_NOT]
            for name, colour in ((KNOWS_NOT, AT_MOST), (KNOWS, AT_LEAST)):
                mean = row["mean_ms"][name]
                text = f"{number(mean)} ms" + (f", {ratio:.2f} times" if name == KNOWS else "")
                missed = name == KNOWS and ratio > GOALS[load]
                bars.append(Bar(f"{row['case']}: {name}", mean, text, colour, missed=missed))
        panels.append(Panel(f"{load:.0%} load: at most {GOALS[load]} times", tuple(bars)))
    title = "Mean time to the first token at four engines that share a pool"
    about = f"{found['engines']}; {PROMPTS} prompts by Zipf's law; a router that knows of the pool, and one without"
    return Picture(title, about, tuple(panels))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kvlane", help="the program")
    parser.add_argument("--engine", action="append", help="a real engine's URL; simulated ones without it")
    parser.add_argument("--model", help="what the real engines serve")
    parser.add_argument("--rounds", type=int, default=3, help="turns of both routers before real engines")
    parser.add_argument("--requests", type=int, default=200, help="requests of a turn before real engines")
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    if given.engine:
        rows = real(given.kvlane, given.engine, given.model, given.rounds, given.requests)
        engines = f"{len(given.engine)} real engines"
    else:
        rows, engines = simulated(given.kvlane), "simulated CPU engines"
    found = {"engines": engines, "rows": rows}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "pool.json").write_text(json.dumps(found, indent=1) + "\n")
    save(picture(found), given.out / "pool.png")
    for row in rows:
        ratio = row["mean_ms"][KNOWS] / row["mean_ms"][KNOWS_NOT]
        means = f"{row['mean_ms'][KNOWS_NOT]:9.1f} -> {row['mean_ms'][KNOWS]:9.1f} ms"
        print(f"{row['case']:40} {row['load']:.0%} {means} {ratio:.3f}")


if __name__ == "__main__":
    main()
