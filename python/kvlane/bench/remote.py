"""`kvlane bench remote`: what blocks of another host's daemon cost, between network namespaces of this one. With a peer
beside it: bench/remote/peers.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from kvlane.bench import network, remote_fetch, remote_lookups, remote_owner, report
from kvlane.bench.extra import tqdm
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.remote_hosts import HERE, Host, Peer, Settings
from kvlane.bench.sizes import count, parse_size

NAME = "remote"
HELP = "blocks of other hosts' daemons: fetches beside READs, paced owners, cold lookups, an owner that lends"
Part = Callable[[Settings], tuple[list[Figure], dict[str, Any]]]
PARTS: dict[str, Part] = {
    "tcp": lambda settings: remote_fetch.fetch(settings, with_tls=False),
    "tls": lambda settings: remote_fetch.fetch(settings, with_tls=True),
    "paced": remote_fetch.paced,
    "owner": remote_owner.owner,
    "cold": remote_lookups.cold,
    "seen": remote_lookups.seen,
    "index": remote_lookups.index,
    "ssd": remote_lookups.ssd,
}
NO_PEERS: Mapping[str, Peer] = {}
# Written before the first measurement.
PREDICTED = {
    "fetch, TCP / mooncake": "1.5",
    "fetch, TCP / READ and crc32c in series": "0.95",
    "fetch, TLS / READ and crc32c in series": "1.0",
    "two owners / sum of their paces": "0.93",
    "share of the owner of 300 MB/s, off its part": "8 %",
    "share of the owner of 600 MB/s, off its part": "4 %",
    "one killed half-way: blocks found": "100 %",
    "hit at the owner while it lends, p99 / alone": "3x on two cores, as beside READs",
    "cold lookup, cluster on, p50: more than without": "0.3 ms",
    "cold lookup, peer stopped: more at first": "1.2 ms",
    "cold lookup, peer stopped: more then, p50": "0 ms",
    "cold lookup, peer killed: more at first": "0.3 ms",
    "cold lookup, peer killed: more then, p50": "0 ms",
    "visible here, found from another host, p99": "2 ms",
    "index: visible here, found from another host, p99": "8 ms",
    "index: cold lookup, p50: more than without": "0.3 ms",
    "index: cold lookup, all replicas killed: more at first": "1.2 ms",
    "index: cold lookup, all replicas killed: more then, p50": "0 ms",
    "SSD hit, owner stopped: more, p50": "0.3 ms",
    "SSD hits, owner stopped: blocks missing": "0 blocks",
}


def add_arguments(parser: argparse.ArgumentParser, peers: Mapping[str, Peer] = NO_PEERS) -> None:
    """The flags of `kvlane bench remote`."""
    parser.add_argument("--bytes", type=parse_size, default=1 << 30, help="of one fetch (default: 1g)")
    parser.add_argument("--block-bytes", type=parse_size, default=2 << 20, help="of a block (default: 2m)")
    parser.add_argument(
        "--rounds", type=count, default=5, help="of each kind, in turns (default %(default)s)"
    )
    parser.add_argument("--lookups", type=count, default=1000, help="in a phase (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of a phase in which an owner lends (default %(default)s)"
    )
    parser.add_argument(
        "--answer-ms",
        type=count,
        help="--cluster-answer-ms of daemons whose lookups are measured (default: theirs; a debug build needs more)",
    )
    parser.add_argument(
        "--parts",
        type=lambda text: _names(text, PARTS),
        default=list(PARTS),
        help=f"what to measure (default: {','.join(PARTS)})",
    )
    if peers:
        parser.add_argument(
            "--vs",
            type=lambda text: [] if text == "none" else _names(text, peers),
            help=f"what else to measure, in turns: {','.join(peers)} or none (default: what is there)",
        )
    parser.add_argument(
        "--one-host", action="store_true", help="no network namespaces: loopback instead, and no paced owners"
    )
    add_out(parser)


def run(arguments: argparse.Namespace, peers: Mapping[str, Peer] = NO_PEERS) -> int:
    """Measures and publishes, in network namespaces."""
    if not arguments.one_host and (refused := network.enter()):
        sys.exit(f"kvlane bench remote: {refused}; or add --one-host")
    with report.CpuWatch() as watch:
        outcome = measure(arguments, peers)
    status = publish(arguments, outcome, watch)
    print(predictions(outcome))
    return status


def measure(arguments: argparse.Namespace, peers: Mapping[str, Peer] = NO_PEERS) -> Outcome:
    """All parts, one after the other. In each, a fetch or a lookup takes turns with what it is compared with."""
    present = _present(getattr(arguments, "vs", None), peers)
    figures: list[Figure] = []
    details: dict[str, Any] = {"parts": {}, "left_out": {}, "predicted": PREDICTED}
    with ExitStack() as stack:
        here, owners = HERE, (HERE, HERE)
        if not arguments.one_host:
            others = [stack.enter_context(network.OtherHost(number)) for number in range(2)]
            here = Host(network.NEAR)
            first, second = (Host(other.address, tuple(other.inside), other) for other in others)
            owners = (first, second)
        settings = Settings(
            here,
            owners,
            arguments.bytes,
            arguments.block_bytes,
            arguments.rounds,
            arguments.lookups,
            arguments.seconds,
            arguments.answer_ms,
            present,
        )
        with tqdm(total=len(arguments.parts), unit="part", leave=False) as progress:
            for name in arguments.parts:
                progress.set_description(name)
                try:
                    found, details["parts"][name] = PARTS[name](settings)
                except OSError as error:
                    report.say(f"{name} is not measured: {error}")
                    details["left_out"][name] = str(error)
                    continue
                finally:
                    progress.update()
                figures += found
    where = "loopback" if arguments.one_host else "two network namespaces, TCP between them"
    note = (
        f"Daemons on {where}; medians over {arguments.rounds} rounds in which all take turns. A fetch is a lookup of "
        f"{settings.blocks} blocks of {settings.block_bytes >> 10} KiB that only the owner has, until it is answered "
        "with all of them, each compared with its checksum. READ is one transfer of kvlane.fabric of as many bytes in "
        "as many pieces between two other processes, without checksums of the fabric's own. Lookups "
        "without a cluster are those of another daemon, in turns. At first: the slowest of the three lookups after the "
        "peer was stopped or killed."
    )
    return Outcome(NAME, figures, details, note)


def predictions(outcome: Outcome) -> str:
    """The figures with a goal beside what was predicted."""
    rows = [
        [figure.what, figure.text, PREDICTED.get(figure.what, "-")]
        for figure in outcome.figures
        if figure.goal
    ]
    return report.table(["figure", "measured", "predicted"], rows)


def _present(asked: list[str] | None, peers: Mapping[str, Peer]) -> dict[str, Peer]:
    """The peers that can be measured. A missing one is named. If the user asked for it, the benchmark ends."""
    present = {}
    for name in peers if asked is None else asked:
        why = peers[name].missing()
        if why is None:
            present[name] = peers[name]
            continue
        sentence = f"{name} is not measured, {why}: {peers[name].install}"
        if asked is not None:
            sys.exit(sentence)
        report.say(sentence)
    return present


def _names(text: str, known: Iterable[str]) -> list[str]:
    named, all_known = text.split(","), list(known)
    if unknown := [each for each in named if each not in all_known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(all_known)}")
    return named
