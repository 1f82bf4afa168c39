"""Long rounds of what `make test` and `make gate` do in short ones, each time with other seeds.

    python scripts/soak.py                              all parts once
    python scripts/soak.py ssd-kills fuzz               these
    python scripts/soak.py --minutes 60 ssd-kills fuzz  these, again and again, each for half an hour or longer

A part that fails does not end the others; the table at the end says what became of each. The first line says when all
stages of `.ci/run` last passed on main.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cargo import ROOT
from selection import PASSED, Landing, landings

# The wheel of the release before.
FORMER_WHEEL = "KVLANE_FORMER_WHEEL"
ROUNDS = {"KVLANE_TEST_ROUNDS": "1000"}


@dataclass
class Part:
    """A part of the soak, which can be repeated."""

    what: str
    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    """A variable without which the part is left out."""


def _rust(*arguments: str) -> list[str]:
    return ["cargo", "test", "--locked", "--release", *arguments]


def _make(*arguments: str) -> list[str]:
    return ["make", *arguments]


PARTS = {
    "properties": Part(
        "20,000 cases of each property of the pure crates and the store",
        _rust(*(f"-pkvlane-{name}" for name in ("block", "memory", "policy", "store", "proto", "index"))),
        {"PROPTEST_CASES": "20000"},
    ),
    "simulation": Part(
        "200,000 seeds of the fabric's simulated network",
        _rust("-p", "kvlane-fabric", "--test", "simulation"),
        {"KVLANE_TEST_SEEDS": "200000"},
    ),
    "hubs": Part(
        "100,000 seeds of processes with the fabric's hubs, over simulated connections and carriers",
        _rust("-p", "kvlane-fabric", "--lib", "hub::simulation"),
        {"KVLANE_TEST_SEEDS": "100000"},
    ),
    "handoffs": Part(
        "1,000,000 seeds of engines that hand prompts over, over a simulated network and memory",
        _rust("-p", "kvlane-handoff", "--test", "simulation"),
        {"KVLANE_TEST_SEEDS": "1000000"},
    ),
    "loans": Part(
        "10,000 seeds of hosts that lend each other blocks, over a simulated network",
        _rust("-p", "kvlane-cluster", "--lib", "simulation"),
        {"KVLANE_TEST_SEEDS": "10000"},
    ),
    "links": Part(
        "2,000,000 seeds of an engine's links against a simulated daemon",
        _rust("-p", "kvlane-client", "--test", "simulation"),
        {"KVLANE_TEST_SEEDS": "2000000"},
    ),
    "canaries": Part(
        "1,000 rounds of GPU loads whose blocks are used again",
        _rust("-p", "kvlane-server", "--test", "gpu", "canary"),
        ROUNDS,
    ),
    "ssd-kills": Part(
        "1,000 kills of a process that writes to the SSD tier, 100 cases of its model",
        _rust("-p", "kvlane-ssd"),
        {**ROUNDS, "PROPTEST_CASES": "100"},
    ),
    "connects": Part(
        "1,000 peers of the fabric that come and go over TCP, as many on one host, within a process, and with GPUs",
        _rust(
            *("-p", "kvlane-fabric", "--lib", "--test", "processes", "--test", "same_host"),
            *("--test", "between_gpus", "come_and_go"),
        ),
        ROUNDS,
    ),
    "gpu-windows": Part(
        "10,000 rounds of GPU blocks that are used again while other processes read them through windows",
        _rust("-p", "kvlane-fabric", "--test", "between_gpus", "reused"),
        {"KVLANE_TEST_ROUNDS": "10000"},
    ),
    "storms": Part(
        "1,000 writes over TCP that are given up at any moment, and as many that end their connections",
        _rust("-p", "kvlane-fabric", "--test", "processes", "storm"),
        ROUNDS,
    ),
    "daemon-kills": Part(
        "1,000 rounds in which daemon and engines are killed, 300 with an SSD; kvlane as users get it",
        _make("python", "RELEASE=1", "ARGS=tests/daemon -m soak"),
    ),
    "cluster": Part(
        "1,000 rounds in which a daemon fails while another host reads its blocks, and wires that are cut",
        _make("python", "RELEASE=1", "ARGS=tests/daemon/test_cluster_hosts.py -m soak -s"),
        ROUNDS,
    ),
    "all-to-all": Part(
        "64 ranks of kvlane.moe beside the oracle, 1,000 all-to-alls that are made and closed",
        _make("python", "ARGS=tests/moe -m soak"),
    ),
    "engines": Part(
        "all tests of vLLM, newest and oldest; kvlane as users get it",
        _make("engines", "data-parallel", "oldest", "RELEASE=1", "OLDEST=all"),
    ),
    "families": Part(
        "small models with windows, chunks and states: forty answers each, warm, after restarts and from the SSD; "
        "handed over; known by the router",
        _make(
            "engines",
            "ARGS=-m soak tests/connector/test_vllm_families.py tests/connector/test_vllm_direct_groups.py "
            "tests/engine/test_route_groups.py",
        ),
    ),
    "context-parallel": Part(
        "ranks that share the tokens of each block: what one engine computed is a hit after a restart, and handed over",
        _make(
            "engines",
            "ARGS=-m soak tests/connector/test_vllm_context_parallel.py",
        ),
    ),
    "chaos": Part(
        "5,000 requests of a real vLLM whose daemon is killed, stopped and restarted at the worst moments",
        _make("engines", "RELEASE=1", "ARGS=tests/connector/test_vllm_chaos.py -s"),
        {"KVLANE_TEST_ROUNDS": "50"},
    ),
    "demo": Part("the demo, on the CPU", _make("demo", "ARGS=--device cpu")),
    "demo-pd": Part("prefill and decode engines behind the router, one of each", _make("demo-pd")),
    "demo-flip": Part(
        "a worker beside a prefill and a decode engine, which changes its role with the work",
        _make("demo-pd", "ARGS=--flip"),
    ),
    "many-decode": Part(
        "one prefill and three decode engines behind the router, with vLLM's own bench client",
        _make("demo-pd", "ARGS=--prefill 1 --decode 3 --vllm-bench"),
    ),
    "many-prefill": Part(
        "three prefill engines and one decode engine behind the router, with vLLM's own bench client",
        _make("demo-pd", "ARGS=--prefill 3 --decode 1 --vllm-bench"),
    ),
    "demo-direct": Part(
        "a prefill and a decode engine that hand over directly, and one with two decode engines",
        _make("demo-direct", "ARGS=--prefill 1 --decode 2"),
    ),
    "direct-many-decode": Part(
        "one prefill and three decode engines that hand over directly",
        _make("demo-direct", "ARGS=--prefill 1 --decode 3"),
    ),
    "direct-many-prefill": Part(
        "three prefill engines and one decode engine that hand over directly",
        _make("demo-direct", "ARGS=--prefill 3 --decode 1"),
    ),
    "demo-cluster": Part(
        "two hosts whose daemons lend each other blocks, with real engines",
        _make("demo-cluster"),
    ),
    "route": Part(
        "20 minutes of a router whose engines are killed and restarted while clients attack it",
        _make("python", "RELEASE=1", "ARGS=tests/router/test_route_soak.py -m soak -s"),
    ),
    "day": Part(
        "a day's work of a daemon and a router in an hour, with engines that die, traces, pages and recordings",
        # Named here, because a sub-make would take the MINUTES of `make soak`.
        _make("soak-day", "MINUTES=60"),
    ),
    "direct-busy": Part(
        "engines that hand over directly beside 16 busy loops, bound to one processor and not",
        _make("engines", "ARGS=-m soak -s tests/engine/test_direct_busy.py"),
    ),
    "route-direct": Part(
        "a prefill and a decode engine that hand over directly, behind the router",
        _make("engines", "ARGS=-m soak tests/engine/test_route_direct.py"),
    ),
    "p2p-nccl": Part(
        "1P3D and 3P1D with P2P NCCL's configurations, behind a proxy like vLLM's and behind kvlane route",
        _make("engines", "ARGS=-m soak tests/engine/test_p2p_nccl.py"),
    ),
    "vllm-router": Part(
        "engines that hand over directly behind vllm-router: a pair, and 1P3D and 3P1D that ping",
        [sys.executable, "scripts/vllm_router_pair.py"],
    ),
    "direct-lost": Part(
        "engines that hand over directly, of which some come and go, or are killed, stopped or out of blocks; GET",
        _make(
            "engines",
            "ARGS=-m soak tests/connector/test_vllm_direct.py tests/connector/test_vllm_direct_lost.py "
            "tests/connector/test_vllm_direct_joining.py",
        ),
    ),
    "direct-ranks": Part(
        "engines of two ranks that hand over directly: tensor parallel, and in pipeline stages",
        _make("engines", "ARGS=-m soak tests/connector/test_vllm_direct_served.py"),
    ),
    "direct-drafter": Part(
        "engines with a drafter that hand over directly",
        _make("engines", "ARGS=-m soak tests/connector/test_vllm_direct_drafter.py"),
    ),
    "ngrams": Part(
        "a drafter that looks up n-grams beside windows: from the store, and handed over directly",
        _make("engines", "ARGS=-m soak tests/connector/test_vllm_ngrams.py"),
    ),
    "nixl": Part(
        "a prefill and a decode engine with vLLM's NixlConnector behind the router",
        [sys.executable, "scripts/nixl_pair.py"],
    ),
    "former-release": Part(
        "an engine with the wheel of the release before, on either side of a pair; needs --former-wheel",
        _make("engines", "RELEASE=1", "ARGS=tests/engine/test_route_former.py -m soak"),
        needs=FORMER_WHEEL,
    ),
    "dynamo": Part(
        "the selector of Dynamo's router beside ours, on a generated trace",
        [sys.executable, "scripts/dynamo_replay.py"],
    ),
    "loom": Part("all orders of the steps at the ring in shared memory, and of ranks", _make("loom")),
    "manylinux": Part("the wheel that users get, installed where there is no Rust", _make("manylinux")),
    "fuzz": Part("five minutes of each fuzz target", _make("fuzz", "ARGS=--seconds 300")),
    "defects": Part(
        "each defect of tests/defects, put back, is found", [sys.executable, "scripts/defects.py"]
    ),
}


def main() -> None:
    width = max(map(len, PARTS))
    parts = "\n".join(f"  {name:{width}}  {part.what}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nparts:\n{parts}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="all if none is named")
    parser.add_argument(
        "--minutes", type=float, default=0, help="that they take together, at least; default: each runs once"
    )
    parser.add_argument(
        "--former-wheel",
        type=Path,
        metavar="WHEEL",
        help="of the release before, for the part former-release, which is left out without it",
    )
    arguments = parser.parse_args()
    if arguments.former_wheel is not None:
        if not arguments.former_wheel.is_file():
            parser.error(f"--former-wheel {arguments.former_wheel} is no file")
        os.environ[FORMER_WHEEL] = str(arguments.former_wheel.resolve())
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    asked = arguments.parts or list(PARTS)
    not_given = [name for name in asked if PARTS[name].needs and PARTS[name].needs not in os.environ]
    names = [name for name in asked if name not in not_given]
    if not names:
        parser.error(f"{', '.join(not_given)}: --former-wheel is not given")
    print(last_whole_run(landings(PASSED.read_text())), flush=True)
    share = arguments.minutes * 60 / len(names)
    told = [soak(name, share) for name in names]
    print("\n==> soak")
    for name, times, seconds, failed in told:
        print(f"{seconds:8.0f} s  {name:{width}}  {times} times, {'FAILED' if failed else 'passed'}")
    for name in not_given:
        print(f"{'':10}  {name:{width}}  left out: --former-wheel is not given")
    failures = sum(failed for *_, failed in told)
    print(f"{len(told) - failures} passed, {failures} failed")
    sys.exit(1 if failures else 0)


def last_whole_run(known: Sequence[Landing]) -> str:
    """The newest commit on main on which all stages of `.ci/run` passed, as a sentence."""
    whole = [number for number, landing in enumerate(known) if landing.is_whole]
    if not whole:
        return "all stages of .ci/run have never passed on a commit that .ci/passed names"
    newest, since = known[whole[-1]], len(known) - 1 - whole[-1]
    return (
        f"all stages of .ci/run last passed on {newest.commit}, {newest.date}; {since} landings have followed"
    )


def soak(name: str, share: float) -> tuple[str, int, float, bool]:
    """Repeats one part until its share of the time is over, or it fails. Returns name, times, seconds, and whether it
    failed."""
    part, times, began = PARTS[name], 0, time.monotonic()
    while True:
        print(f"\n==> {name}: {part.what}", flush=True)
        times += 1
        environment = {**os.environ, **part.variables}
        status = subprocess.run(part.command, cwd=ROOT, env=environment, check=False).returncode
        seconds = time.monotonic() - began
        if status or seconds >= share:
            return name, times, seconds, status != 0


if __name__ == "__main__":
    main()
