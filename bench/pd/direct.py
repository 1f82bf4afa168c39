"""Prompts from a prefill engine to a decode engine: kvlane's direct hand-offs beside vLLM's NixlConnector, in turns.

    python bench/pd/direct.py                       # 40 prompts of 1,000 tokens, 32 KiB of KV cache a token
    python bench/pd/direct.py --nixl FOLDER         # where NIXL 1.5.1 was installed; without it kvlane alone
    python bench/pd/direct.py --windows --store     # sliding windows, and a pair that hands over through a daemon

Real engines on the CPU, a pair of each system. Those that are not asked are stopped (SIGSTOP): an idle agent of
NIXL keeps a core busy. This program is the proxy of both: it asks the prefill engine for one token, gives what its
answer says to the decode engine, and takes the time to the first token that comes from there. Each prompt is asked of
one engine too, so what counts is how much later the pair answers. kvlane's pair is asked both at once besides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlane.bench import report
from kvlane.bench.drawing import COLOURS, Bar, Panel, Picture, number, save
from kvlane.bench.processes import connector_config, free_port, own_daemon
from kvlane.demo.direct.asking import hand_over, stream
from kvlane.demo.direct.cluster import Side
from kvlane.demo.model import ModelShape, build_model
from kvlane.demo.pd.asking import ANSWER_TIMEOUT_S, MODEL_NAME, prompt_text, prompt_tokens
from kvlane.demo.pd.plan import BLOCK_TOKENS, Node
from kvlane.demo.pd.processes import ServedEngine, end_all, wait_until

# 8 layers, keys and values, 4 heads of 128 numbers of 4 bytes: 32 KiB a token.
SHAPE = ModelShape(layers=8, hidden=512, heads=4, kv_heads=4, head_dim=128, intermediate=1024)
KV_CACHE = 512 << 20
# Three of four layers see so many tokens with --windows.
WINDOW = 256
ANSWER_TOKENS = 4
TURN = 5


@dataclass
class System:
    """A pair of engines, and what was measured of it."""

    name: str
    prefill: Side
    decode: Side
    later_ms: list[float] = field(default_factory=list)
    """For each prompt, the time of the pair's first token less that of the one engine."""
    landed: int = 0
    cpu_s: float = 0.0

    def each(self, act: Callable[[ServedEngine], None]) -> None:
        """Do it to both engines."""
        for side in (self.prefill, self.decode):
            act(side.engine)

    def cpu(self) -> float:
        """Seconds that both engines have used."""
        return self.prefill.engine.cpu_seconds() + self.decode.engine.cpu_seconds()


def main() -> int:
    arguments = parse()
    logs = arguments.out / "pd-direct-logs"
    logs.mkdir(parents=True, exist_ok=True)
    model = build_model(arguments.out / "models" / "pd-32-kib", SHAPE)
    if arguments.windows:
        model = with_windows(model)
    systems: list[System] = []
    with report.CpuWatch() as watch, contextlib.ExitStack() as stack:
        try:
            systems.append(start("kvlane", model, logs, arguments))
            if arguments.store:
                address = stack.enter_context(own_daemon("1gb", logs))
                systems.append(start("store", model, logs, arguments, address))
            if arguments.nixl:
                systems.append(start("nixl", model, logs, arguments))
            ready(systems)
            at_once = measure(systems, arguments)
        finally:
            for system in systems:
                system.each(ServedEngine.resume)
            end_all(side.engine for system in systems for side in (system.prefill, system.decode))
    found = result(systems, at_once, arguments, watch)
    publish(found, arguments.out)
    return 0


def with_windows(model: Path) -> Path:
    """The same weights with sliding windows in three of four layers."""
    target = model.with_name(model.name + "-windows")
    shutil.copytree(model, target, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    kinds = [*3 * ["sliding_attention"], "full_attention"] * (SHAPE.layers // 4)
    config |= {"sliding_window": WINDOW, "layer_types": kinds}
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def start(name: str, model: Path, logs: Path, arguments: argparse.Namespace, daemon: str = "") -> System:
    """Both engines of a system. `daemon`: the address of that through which they hand over."""
    sides = []
    for role in ("prefill", "decode"):
        node = Node(f"{name}-{role}", role, free_port())
        handoff = f"127.0.0.1:{free_port()}"
        if name == "kvlane":
            connector = connector_config(f"unix:{logs}/no-daemon.sock")
            keys = {"kvlane.direct": "on", "kvlane.direct.listen": handoff}
            connector["kv_connector_extra_config"] |= keys
            environment = {}
        elif name == "store":
            connector, environment = connector_config(daemon), {}
        else:
            connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
            path = os.pathsep.join(filter(None, [str(arguments.nixl), os.environ.get("PYTHONPATH")]))
            environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "PYTHONPATH": path}
        engine = ServedEngine(
            node,
            str(model),
            connector,
            logs / f"{node.name}.log",
            1,
            2 * arguments.prompt_tokens,
            KV_CACHE,
            environment=environment,
        )
        sides.append(Side(node, engine, handoff))
    return System(name, *sides)


def ready(systems: list[System]) -> None:
    """Return when all engines answer."""
    waiting = [side for system in systems for side in (system.prefill, system.decode)]

    def all_answer() -> bool:
        waiting[:] = [side for side in waiting if not side.engine.is_ready()]
        return not waiting

    wait_until("all engines answer", all_answer)
    report.say("all engines answer")
    for system in systems:
        # Both meet before they are stopped for the first time.
        one_after_the_other(system, prompt_text(200, f"first {system.name}"), 1)
        system.each(ServedEngine.pause)


def one_after_the_other(system: System, prompt: str, tokens: int) -> tuple[list[int], float]:
    """As a proxy for vLLM's NixlConnector asks a pair. Answers the tokens, and the seconds to the first one."""
    began = time.monotonic()
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": params,
    }
    request = urllib.request.Request(
        system.prefill.node.url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as reply:
        said = json.loads(reply.read())["kv_transfer_params"]
    after = time.monotonic() - began
    answer = stream(system.decode, prompt, tokens, said)
    return answer.tokens, after + answer.first_s


def measure(systems: list[System], arguments: argparse.Namespace) -> list[float]:
    """Every prompt with each system, in turns. Answers how much later kvlane's pair answers when both are asked at
    once."""
    at_once: list[float] = []
    pool = ThreadPoolExecutor(2)
    for first in range(0, arguments.prompts, TURN):
        for system in systems if first // TURN % 2 == 0 else systems[::-1]:
            system.each(ServedEngine.resume)
            # Connections that broke meanwhile are made again.
            for turn in range(2):
                one_after_the_other(system, prompt_text(200, f"warm {system.name} {first} {turn}"), 1)
            cpu = system.cpu()
            for index in range(first, min(first + TURN, arguments.prompts)):
                prompt = prompt_text(arguments.prompt_tokens, f"prompt {index}")
                alone = stream(system.prefill, prompt, ANSWER_TOKENS, None, salt="alone")
                before = prompt_tokens(system.decode.node.url)
                tokens, seconds = one_after_the_other(system, prompt, ANSWER_TOKENS)
                if tokens != alone.tokens:
                    raise SystemExit(f"{system.name}: the pair's answer to prompt {index} is another one")
                grown = settled(system, before, arguments.prompt_tokens)
                # Hits of several groups, and those of the store, end with a whole block.
                ends_inside = system.name == "kvlane" and not arguments.windows
                system.landed += grown <= (1 if ends_inside else BLOCK_TOKENS)
                system.later_ms.append((seconds - alone.first_s) * 1e3)
                if system.name == "kvlane":
                    other = prompt_text(arguments.prompt_tokens, f"at once {index}")
                    alone = stream(system.prefill, other, ANSWER_TOKENS, None, salt="alone")
                    made = hand_over(pool, system.prefill, system.decode, other, ANSWER_TOKENS)
                    at_once.append((made.answer.first_s - alone.first_s) * 1e3)
            system.cpu_s += system.cpu() - cpu
            system.each(ServedEngine.pause)
        report.say(f"{min(first + TURN, arguments.prompts)} of {arguments.prompts} prompts")
    return at_once


def settled(system: System, before: Any, tokens: int) -> int:
    """How many tokens of the prompt the decode engine computed."""
    deadline = time.monotonic() + 10
    while (grown := prompt_tokens(system.decode.node.url) - before).total < tokens:
        if time.monotonic() > deadline:
            raise SystemExit(f"{system.name}: the decode engine's counters grew by {grown}")
        time.sleep(0.02)  # vLLM counts beside answering, and tells nobody when it has
    return grown.computed


def result(
    systems: list[System], at_once: list[float], arguments: argparse.Namespace, watch: report.CpuWatch
) -> dict[str, Any]:
    machine = report.machine_facts()
    medians = {system.name: statistics.median(system.later_ms) for system in systems}
    found: dict[str, Any] = {
        "title": f"{arguments.prompts} prompts of {arguments.prompt_tokens} tokens, 32 KiB of KV cache a token, "
        f"{'windows in three of four layers, ' if arguments.windows else ''}"
        f"{machine['cpu']}, {machine['cores']} cores",
        "systems": [
            {
                "name": system.name,
                "later_ms": medians[system.name],
                "later_each_ms": system.later_ms,
                "landed": system.landed,
                "cpu_s": system.cpu_s,
            }
            for system in systems
        ],
        "kvlane_at_once_later_ms": statistics.median(at_once),
        "kvlane_at_once_later_each_ms": at_once,
        "machine": machine | {"cpu_use": watch.facts},
        "commit": report.commit(),
    }
    for name in set(medians) - {"kvlane"}:
        found[f"of_{name}"] = medians["kvlane"] / medians[name]
    return found


def publish(found: dict[str, Any], out: Path) -> None:
    rows = [
        [each["name"], f"{each['later_ms']:.1f}", str(each["landed"]), f"{each['cpu_s']:.1f}"]
        for each in found["systems"]
    ]
    rows.append(["kvlane, both at once", f"{found['kvlane_at_once_later_ms']:.1f}", "", ""])
    print(report.paragraph(found["title"]))
    print(report.table(["pair", "later than one engine, ms", "landed", "CPU s"], rows))
    for name, what in (("nixl", "NixlConnector's"), ("store", "that through the store")):
        if f"of_{name}" in found:
            print(f"kvlane's of {what}: {found[f'of_{name}']:.2f}")
    report.write_json(out / "pd-direct.json", found)
    save(picture(found), out / "pd-direct.png")
    print(f"written: {out / 'pd-direct.json'}, {out / 'pd-direct.png'}")


def picture(found: dict[str, Any]) -> Picture:
    """The medians of all pairs. Samples beyond twice the largest median are arrows, so that the bars can be seen."""
    bars = [(each["name"], each["later_ms"], each["later_each_ms"]) for each in found["systems"]] + [
        ("kvlane, both at once", found["kvlane_at_once_later_ms"], found["kvlane_at_once_later_each_ms"])
    ]
    panel = Panel(
        "First token of a pair, later than of one engine, ms",
        tuple(
            Bar(name, median, f"{number(median)} ms", COLOURS[place], samples=tuple(each))
            for place, (name, median, each) in enumerate(bars)
        ),
    )
    farthest = 2 * max(median for _, median, _ in bars)
    arrows = (
        "; arrows: prompts beyond" if any(max(each, default=0.0) > farthest for _, _, each in bars) else ""
    )
    about = f"{found['title']}. Bars: medians; dots: prompts{arrows}."
    return Picture("From a prefill to a decode engine", about, (panel,), cut_at=farthest)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=40, help="of each system (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="of each (default %(default)s)")
    parser.add_argument("--windows", action="store_true", help="a model with sliding windows")
    parser.add_argument("--store", action="store_true", help="a pair that hands over through a daemon, too")
    parser.add_argument(
        "--nixl", type=Path, help="a folder with NIXL 1.5.1, as pip install --target makes it"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the results (default %(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
