"""Two engines on GPUs, one that prefills and one that decodes: prompts handed over directly, and through the daemon.

    python bench/gpu/handoff.py --out out/direct                # both on one GPU
    python bench/gpu/handoff.py --gpus 2 --out out/direct       # each on its own

| name | what |
|---|---|
| alone | TTFT where the decode engine computes the prompt |
| both at once | TTFT where both engines get the request at once, and blocks land layer by layer |
| one after the other | the prefill engine's answer, and then the decode engine's first token, with blocks that land |
| store | the same with blocks that go through the daemon's pool |
| next turn | TTFT of prompts of which P computed the first four fifths before, and the daemon has them: where D \
loads these and computes the rest, and where both engines get the request at once |
| gaps | between tokens of the decode engine's running requests: while nothing else runs; while the prefill engine \
computes prompts for nobody; while it does, and the decode engine starts requests whose prompts its own GPU memory \
has; and while prompts land. A step in which a request starts is longer, so the third is what the last can reach |
| killed | the prefill engine is killed in the middle of a prompt: until its GPU's memory is free, and until the \
decode engine has answered |

Every prompt is new, and the kinds have their turns with each. Controls: vLLM says how many tokens of a prompt it did
not compute; blocks that land in poisoned memory are byte by byte the prefill engine's; the decode engine answers the
same when it is asked again; each prompt has its own answer; one changed block changes the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import model
from measure import POISON, Engine, start, summary
from provenance import add_arguments, head, public
from systems import ENVIRONMENT, SYSTEMS, kvlane_address, running

from kvlane.bench import report

HERE = Path(__file__).resolve().parent
PEER = "127.0.0.1:7100"
KINDS = ("alone", "both at once", "one after the other", "store")
NEXT_TURN = ("alone", "both at once")
KILL_PATIENCE_S = 15.0
GAPS = ("nothing else", "computing", "starting", "landing")


class Pair:
    """An engine that prefills, P, and one that decodes, D."""

    def __init__(self, p: Engine, d: Engine, settings: argparse.Namespace) -> None:
        self.p, self.d = p, d
        self._settings = settings
        self._source = random.Random(5)
        self.came: dict[str, list[int]] = {kind: [] for kind in KINDS}
        """Tokens of each prompt that D did not compute."""

    def draw(self, tokens: int) -> list[int]:
        vocabulary = model.SHAPES[self._settings.shape]["vocab_size"]
        return [self._source.randrange(100, vocabulary) for _ in range(tokens)]

    async def ask(
        self, kind: str, prompt: list[int], tokens: int = 1, spares_p: bool = True
    ) -> tuple[float, tuple[int, ...]]:
        """Milliseconds from the request to D's first token, and the answer."""
        name = secrets.token_hex(16)
        for_p = {"do_remote_decode": True, "kvlane": {"handoff": name}}
        for_d: dict[str, Any] | None = {"kvlane": {"handoff": name, "peer": PEER}}
        began = time.perf_counter()
        beside = None
        if kind == "both at once":
            beside = asyncio.create_task(self.p.answer(prompt, params=for_p))
        elif kind == "one after the other":
            await self.p.answer(prompt, params=for_p)
        elif kind == "store":
            await self.p.answer(prompt, params={"do_remote_decode": True})
            stored = self.p.handed.get("kvlane", {})
            for_d = {
                "kvlane": {key: value for key, value in stored.items() if key not in ("handoff", "peer")}
            }
        else:
            for_d = None
        before = (time.perf_counter() - began) * 1e3
        times, answer = await self.d.answer(prompt, tokens, for_d)
        self.came[kind].append(self.d.cached_tokens)
        if beside is not None:
            await asyncio.gather(beside, return_exceptions=not spares_p)
        return before + times[0], answer

    async def turn_before(self) -> list[int]:
        """Four fifths of a prompt, which P computes and the daemon stores."""
        prompt = self.draw(self._settings.tokens * 4 // 5 // 128 * 128)
        await self.p.answer([*prompt, 100])
        await asyncio.sleep(0.5)  # P saves it
        return prompt

    def counted(self, name: str) -> float:
        """One of D's counters: vLLM counts for the engine that was started last."""
        from prometheus_client import REGISTRY

        name = f"vllm:kvlane_direct_{name}_total"
        return sum(
            each.value for metric in REGISTRY.collect() for each in metric.samples if each.name == name
        )

    def loaded(self) -> float:
        """Tokens that D loaded from the daemon while the rest landed."""
        return self.counted("loaded_tokens")

    def landed_bytes(self) -> list[str]:
        """Bytes that D has read of P's blocks, by carrier."""
        return [f"{carrier} {self.counted(f'{carrier}_bytes'):.0f}" for carrier in ("cuda", "cma", "tcp")]

    async def next_turns(self) -> dict[str, list[float]]:
        """The times of D's first tokens, by kind of turn."""
        times: dict[str, list[float]] = {kind: [] for kind in NEXT_TURN}
        for index in range(self._settings.prompts):
            for turn in range(len(NEXT_TURN)):
                kind = NEXT_TURN[(index + turn) % len(NEXT_TURN)]
                before = await self.turn_before()
                prompt = before + self.draw(self._settings.tokens - len(before))
                times[kind].append((await self.ask(kind, prompt))[0])
                await asyncio.sleep(0.3)
        return times

    async def gaps(self, what: str) -> list[float]:
        """Between tokens of D's running requests, while so many prompts come."""
        settings = self._settings
        known = [self.draw(settings.tokens) for _ in range(settings.landings)] if what == "starting" else []
        for prompt in known:
            await self.d.answer(prompt)

        async def decode() -> list[float]:
            began = time.perf_counter()
            times, _ = await self.d.answer(self.draw(512), settings.decode_tokens)
            return [began + each / 1e3 for each in times]

        running_requests = [asyncio.create_task(decode()) for _ in range(settings.decodes)]
        await asyncio.sleep(1.0)  # all of them decode by then
        first = time.perf_counter()
        for index in range(settings.landings):
            if what == "landing":
                await self.ask("both at once", self.draw(settings.tokens))
            elif what == "computing":
                await self.p.answer(self.draw(settings.tokens))
            elif what == "starting":
                await asyncio.gather(self.p.answer(self.draw(settings.tokens)), self.d.answer(known[index]))
            else:
                await asyncio.sleep(0.3)
        last = time.perf_counter()
        between: list[float] = []
        for came in await asyncio.gather(*running_requests):
            if came[-1] < last:
                report.say("    --decode-tokens are too few: a request ended before the prompts did")
            between += [(b - a) * 1e3 for a, b in itertools.pairwise(came) if first <= a and b <= last]
        return between

    async def same_bytes(self, found: dict[str, Any], name: str, is_next_turn: bool = False) -> None:
        """Compares the bytes that land or are loaded in poisoned memory with those that P computed. D computes the last
        token, so the block with it may differ in its last bits."""
        for engine in (self.p, self.d):
            await engine.forget()
            await engine.on_workers(model.poison, POISON)
        for _ in range(2):
            before = await self.turn_before() if is_next_turn else []
            await self.ask("both at once", before + self.draw(self._settings.tokens + 7 - len(before)))
        computed, landed = [await each.on_workers(model.block_hashes, POISON) for each in (self.p, self.d)]
        found[f"{name}_blocks"] = [len(of_rank) for of_rank in landed]
        differ = [
            model.blocks_that_differ(ours, theirs) for ours, theirs in zip(landed, computed, strict=True)
        ]
        found[f"{name}_blocks_that_differ"] = differ
        found[f"control_{name}_bytes"] = min(found[f"{name}_blocks"]) > 0 and max(differ) <= 2

    async def same_answers(self, found: dict[str, Any]) -> None:
        """Answers of D with the landed blocks, and of D again later: a block that comes late would change the second.
        Both compute one token behind whole blocks. P's answers may differ from D's in late tokens: each engine compiles
        kernels of its own."""
        prompts = [self.draw(self._settings.tokens // 128 * 128 + 1) for _ in range(6)]
        landed = [(await self.ask("both at once", prompt, 16))[1] for prompt in prompts]
        again = [(await self.d.answer(prompt, 16))[1] for prompt in prompts]
        of_p = [(await self.p.answer(prompt, 16))[1] for prompt in prompts]
        pairs = zip(landed, of_p, strict=True)
        alike = [sum(1 for _ in itertools.takewhile(bool, map(int.__eq__, *two))) for two in pairs]
        found["tokens_like_the_prefill_engines"] = alike
        changed = list(prompts[0])
        changed[64:96] = [token + 1 for token in changed[64:96]]
        found["same_tokens"] = landed == again
        found["control_distinct"] = len(set(again)) == len(again)
        found["control_block_matters"] = (await self.d.answer(changed, 16))[1] != again[0]


async def killed(pair: Pair, settings: argparse.Namespace, processes: list[int]) -> dict[str, Any]:
    """Kills P in the middle of a prompt. D answers as it does when it is asked again, and P's memory is free."""
    prompt = pair.draw(settings.tokens // 128 * 128 + 1)
    began = time.perf_counter()
    asked = asyncio.create_task(pair.ask("both at once", prompt, 16, spares_p=False))
    await asyncio.sleep(0.12)  # about half of the prompt is computed
    with_p = used_memory(0)
    for process in processes:
        os.kill(process, signal.SIGKILL)
    killed_at = time.perf_counter()
    free_after = None
    while with_p is not None and time.perf_counter() < killed_at + KILL_PATIENCE_S:
        if (used_memory(0) or 0) < with_p - settings.kv_cache_bytes:
            free_after = round(time.perf_counter() - killed_at, 3)
            break
        await asyncio.sleep(0.02)
    answer = (await asked)[1]
    answered = round(time.perf_counter() - began, 3)
    again = (await pair.d.answer(prompt, 16))[1]
    return {"memory_free_after_s": free_after, "answered_within_s": answered, "same_answer": answer == again}


def used_memory(gpu: int) -> int | None:
    """Bytes of a GPU that are allocated; None without NVIDIA's library."""
    try:
        from vllm.third_party import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).used)
    except pynvml.NVMLError as error:
        report.say(f"the GPU's used memory is not known: {error}")
        return None


async def measure(pair: Pair, settings: argparse.Namespace, processes_of_p: list[int]) -> dict[str, Any]:
    """All that the table above names."""
    found: dict[str, Any] = {"async_scheduling": pair.d.has_async_scheduling()}
    for engine in (pair.p, pair.d):
        await engine.on_workers(model.redraw_weights, model.DEVIATION[settings.shape])
        # kvlane looks at the weights again.
        await engine.forget()
    for kind in KINDS:
        await pair.ask(kind, pair.draw(settings.tokens))
        await pair.ask(kind, pair.draw(200))
    await pair.same_bytes(found, "landed")
    await pair.same_bytes(found, "next_turn", is_next_turn=True)
    await pair.same_answers(found)
    pair.came = {kind: [] for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    waits: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for index in range(settings.prompts):
        for turn in range(len(KINDS)):
            kind = KINDS[(index + turn) % len(KINDS)]
            waited = pair.counted("wait_seconds")
            times[kind].append((await pair.ask(kind, pair.draw(settings.tokens)))[0])
            await asyncio.sleep(0.3)  # what is saved does not take the next one's links
            waits[kind].append((pair.counted("wait_seconds") - waited) * 1e3)
    found["ttft"] = {kind: summary(values) for kind, values in times.items()}
    found["waits_for_p"] = {kind: summary(waits[kind]) for kind in ("both at once", "one after the other")}
    found["tokens_not_computed"] = {kind: min(values, default=0) for kind, values in pair.came.items()}
    pair.came = {kind: [] for kind in KINDS}
    loaded = pair.loaded()
    found["next_turn"] = {kind: summary(values) for kind, values in (await pair.next_turns()).items()}
    found["next_turn_tokens_loaded"] = pair.loaded() - loaded
    found["next_turn_tokens_not_computed"] = {kind: min(pair.came[kind]) for kind in NEXT_TURN}
    gaps: dict[str, list[list[float]]] = {what: [] for what in GAPS}
    for _ in range(settings.gap_rounds):
        for what in GAPS:
            gaps[what].append(await pair.gaps(what))
    found["gaps"] = {what: summary([gap for one in rounds for gap in one]) for what, rounds in gaps.items()}
    found["landed_bytes"] = pair.landed_bytes()
    found["gaps_p99_by_round"] = {
        what: [summary(one).get("p99") for one in rounds] for what, rounds in gaps.items()
    }
    found["killed"] = await killed(pair, settings, processes_of_p)
    return found


def table(found: dict[str, Any]) -> str:
    """For people."""
    alone = found["ttft"]["alone"]["p50"]
    rows = [
        [kind, f"{each['p50']:.1f}", f"{each['p50'] - alone:+.1f}", str(found["tokens_not_computed"][kind])]
        for kind, each in found["ttft"].items()
    ]
    lines = [report.table(["TTFT", "p50 ms", "beside alone", "tokens not computed"], rows)]
    rows = [[kind, f"{each['p50']:.1f}"] for kind, each in found["waits_for_p"].items()]
    lines.append(report.table(["D waits for P", "p50 ms"], rows))
    alone = found["next_turn"]["alone"]["p50"]
    not_computed = found["next_turn_tokens_not_computed"]
    rows = [
        [kind, f"{each['p50']:.1f}", f"{each['p50'] - alone:+.1f}", str(not_computed[kind])]
        for kind, each in found["next_turn"].items()
    ]
    lines.append(report.table(["TTFT, next turn", "p50 ms", "beside alone", "tokens not computed"], rows))
    rows = [
        [what, f"{each.get('p50', 0):.2f}", f"{each.get('p99', 0):.2f}"]
        for what, each in found["gaps"].items()
    ]
    lines.append(report.table(["D's gaps beside", "p50 ms", "p99 ms"], rows))
    lines += [f"{name}: {value}" for name, value in found.items() if not isinstance(value, dict)]
    lines += [f"killed, {name}: {value}" for name, value in found["killed"].items()]
    return "\n".join(lines)


def controls_hold(found: dict[str, Any], tokens: int) -> bool:
    """Whether the bytes are right, and were not computed."""
    names = (
        "control_landed_bytes",
        "control_next_turn_bytes",
        "same_tokens",
        "control_distinct",
        "control_block_matters",
    )
    came = found["tokens_not_computed"]
    lands = all(came[kind] >= tokens - 1 for kind in ("both at once", "one after the other"))
    lands = lands and found["next_turn_tokens_not_computed"]["both at once"] >= tokens - 1
    lands = lands and found["next_turn_tokens_loaded"] > 0
    lands = lands and found["killed"]["same_answer"]
    return lands and came["alone"] == 0 and came["store"] > tokens // 2 and all(found[name] for name in names)


def children() -> list[int]:
    """This process's children, and theirs."""
    found = [os.getpid()]
    for process in found:  # grows meanwhile
        for thread in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                found += map(int, thread.read_text().split())
    return found[1:]


def start_one(settings: argparse.Namespace, number: int, folder: Path) -> Engine:
    """The prefill engine (0) or the decode engine (1), both with kvlane's direct hand-offs and its daemon."""
    config = json.loads(SYSTEMS["kvlane"].connector(settings.cache_bytes, folder))
    direct = {"kvlane.direct": "on"} | ({"kvlane.direct.listen": PEER} if number == 0 else {})
    config["kv_connector_extra_config"] |= direct | json.loads(settings.extra)
    return on_own_gpu(settings, number, json.dumps(config))


def on_own_gpu(settings: argparse.Namespace, number: int, connector: str) -> Engine:
    """An engine of a pair: with two GPUs on the one of its number."""
    if settings.gpus == 2:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
    return start(argparse.Namespace(**vars(settings) | {"connector": connector}))[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="one for both, or each its own")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of each engine")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--no-async-scheduling", dest="async_scheduling", action="store_const", const=False, default=None
    )
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="llama-8b")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--decodes", type=int, default=8, help="requests that run in D (default %(default)s)")
    parser.add_argument("--decode-tokens", type=int, default=600)
    parser.add_argument("--landings", type=int, default=5, help="while they run (default %(default)s)")
    parser.add_argument("--gap-rounds", type=int, default=3)
    parser.add_argument("--cache-bytes", type=int, default=24_000_000_000, help="of the daemon's pool")
    parser.add_argument("--kv-cache-bytes", type=int, default=13_000_000_000, help="of each engine")
    parser.add_argument("--gpu-memory", type=float, default=0.12, help="share that is free at each start")
    parser.add_argument(
        "--extra", default="{}", help="further keys of both engines' kv_connector_extra_config, JSON"
    )
    parser.add_argument("--out", type=Path, default=Path("out/direct"))
    add_arguments(parser)
    settings = parser.parse_args()
    settings.new_tokens = 0
    if settings.gpus == 2 and settings.tensor_parallel > 1:
        parser.error("--gpus 2 gives each engine one; with --tensor-parallel they share all that there are")
    result = head("direct hand-offs between engines on GPUs", settings)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    settings.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings.scratch = scratch

        with running(SYSTEMS["kvlane"], settings.cache_bytes, folder, settings.out / "kvlane.log"):
            before = children()
            engines = [start_one(settings, 0, folder)]
            processes_of_p = [process for process in children() if process not in before]
            try:
                engines.append(start_one(settings, 1, folder))
                report.say(f"both engines are up; the daemon is at {kvlane_address(folder)}")
                with report.CpuWatch() as watch:
                    found = asyncio.run(
                        measure(Pair(engines[0], engines[1], settings), settings, processes_of_p)
                    )
            finally:
                for each in engines:
                    each.shutdown()
    result |= {
        "settings": public(settings),
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        "found": found,
    }
    report.write_json(settings.out / "direct.json", result)
    print(table(found))
    return 0 if controls_hold(found, settings.tokens) else 1


if __name__ == "__main__":
    sys.exit(main())
