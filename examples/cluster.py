"""What one host computed is a hit on the next: `make demo-cluster` runs this, in minutes on two cores, without root.

python examples/cluster.py

Two network namespaces stand for two hosts. In each run `kvlane serve --peers ...` and a real vLLM on the CPU; TCP with
TLS goes between the daemons. Then both daemons start again with `--index`, with a `kvlane index` on each host. Where
namespaces are not allowed, `--one-host` runs all of it on this host, over loopback. The scenarios are in
python/kvlane/demo/hosts.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvlane.bench import certificates, network, pictures, report
from kvlane.bench.drawing import save
from kvlane.bench.processes import free_port
from kvlane.bench.replica import Replica
from kvlane.demo import running
from kvlane.demo.device import SETUPS
from kvlane.demo.hosts.scenarios import Hosts
from kvlane.demo.model import build_model
from kvlane.demo.processes import Daemon, close_all
from kvlane.demo.scenarios import Scenario


def main() -> int:
    arguments = parse()
    if not arguments.one_host and (refused := network.enter()):
        sys.exit(f"cluster: two hosts {refused}; or add --one-host")
    setup = SETUPS["cpu"]
    logs = arguments.out / "demo-cluster-logs"
    logs.mkdir(parents=True, exist_ok=True)
    model = build_model(arguments.out / "models" / setup.model_name, setup.shape)
    running.end_at_signals()
    began = time.monotonic()
    with ExitStack() as stack:
        watch = stack.enter_context(report.CpuWatch())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvlane-demo-")))
        inside: list[str] = []
        addresses = ("127.0.0.1", "127.0.0.1")
        if not arguments.one_host:
            other = stack.enter_context(network.OtherHost())
            inside, addresses = other.inside, (network.NEAR, other.address)
        daemons, replicas = start(addresses, inside, folder, logs, setup.pool_size)
        demo = Hosts(
            model, daemons, replicas, inside, logs, setup, arguments.prompt_tokens, arguments.prompts
        )
        stack.callback(lambda: close_all([*demo.engines, *daemons, *replicas]))
        report.say(f"daemons at {addresses[0]} and {addresses[1]}; logs in {logs}")
        for daemon in daemons:
            daemon.start()
        scenarios = running.run(demo.all())
    found = result(scenarios, len(demo.all()), arguments, time.monotonic() - began)
    found["machine"] = report.machine_facts() | {"cpu_use": watch.facts}
    publish(found, arguments.out)
    return 0 if found["passed"] else 1


def start(
    addresses: tuple[str, str], inside: list[str], folder: Path, logs: Path, pool: str
) -> tuple[tuple[Daemon, Daemon], tuple[Replica, Replica]]:
    """The daemons and replicas of hosts A and B, not yet started."""
    token = folder / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    tls = certificates.make(folder)
    ports = [free_port() for _ in range(4)]
    peers = ",".join(f"{address}:{port}" for address, port in zip(addresses, ports[:2], strict=True))

    def proofs(prefix: str) -> tuple[str, ...]:
        flags = (f"--{prefix}token-file", str(token), f"--{prefix}tls-certificate", str(tls.certificate))
        return (*flags, f"--{prefix}tls-key", str(tls.key), f"--{prefix}tls-authority", str(tls.authority))

    def daemon(number: int, name: str, inside: list[str]) -> Daemon:
        home = folder / name
        home.mkdir(0o700)
        flags = ("--peers", peers, "--cluster-listen", f"{addresses[number]}:{ports[number]}")
        flags += proofs("cluster-")
        # Engines and daemons share two cores, so an answer may take long.
        flags += ("--cluster-answer-ms", "100", "--fetch-wait-ms", "20000")
        return Daemon(home, pool, logs, ssd=False, flags=flags, name=f"kvlane-{name}", inside=inside)

    def replica(number: int, name: str, inside: list[str]) -> Replica:
        address = f"{addresses[number]}:{ports[2 + number]}"
        return Replica(address, proofs(""), inside, logs / f"index-{name}.log")

    return (daemon(0, "A", []), daemon(1, "B", inside)), (replica(0, "A", []), replica(1, "B", inside))


def result(
    scenarios: list[Scenario], count: int, arguments: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    """What the demo writes."""
    ttft = {}
    for each in scenarios:
        name = each.name.partition(":")[0]
        if name in pictures.HOSTS and "ttft_ms" in each.figures:
            ttft[name] = each.figures["ttft_ms"] | {"each": each.figures["ttft_each_ms"]}
    controls = [each for each in scenarios if each.name.startswith("control:")]
    return {
        "title": "two daemons on one host" if arguments.one_host else "two hosts, TCP with TLS between them",
        "passed": len(scenarios) == count and all(each.passed for each in scenarios),
        "controls_failed_as_they_must": len(controls) == 2 and all(each.passed for each in controls),
        "prompt_tokens": arguments.prompt_tokens,
        "ttft_ms": ttft,
        "scenarios": [
            {"name": each.name, "passed": each.passed, "figures": each.figures, "problems": each.problems}
            for each in scenarios
        ],
        "seconds": seconds,
        "commit": report.commit(),
    }


def publish(found: dict[str, Any], out: Path) -> None:
    """Prints the table, and writes demo-cluster.json and demo-cluster.png."""
    print(report.paragraph(found["title"]))
    rows = []
    for scenario in found["scenarios"]:
        ttft = scenario["figures"].get("ttft_ms", float("nan"))
        mean = ttft["mean"] if isinstance(ttft, dict) else ttft
        blocks = scenario["figures"].get("blocks_from_a", "")
        rows.append([scenario["name"], mean, str(blocks), "passed" if scenario["passed"] else "FAILED"])
    print(report.table(["scenario", "TTFT ms", "blocks from A", ""], rows))
    for scenario in found["scenarios"]:
        for problem in scenario["problems"]:
            print(report.paragraph(f"{scenario['name']}: {problem}"))
    report.write_json(out / "demo-cluster.json", found)
    save(pictures.hosts(found), out / "demo-cluster.png")
    print(
        f"written: {out / 'demo-cluster.json'}, {out / 'demo-cluster.png'}; {found['seconds']:.0f} s in all"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one-host", action="store_true", help="no network namespaces: loopback instead")
    parser.add_argument("--prompts", type=int, default=4, help="that are timed (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="of each (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the results (default %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.prompts < 2 or not 200 <= arguments.prompt_tokens <= 2400:
        parser.error("--prompts must be at least 2, and --prompt-tokens from 200 to 2400")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
