"""`kvlane bench index`: replicas of a cluster's index as real processes, beside messages of the same bytes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvlane import _bench
from kvlane.bench import daemon, report
from kvlane.bench.children import Child
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.processes import beside_python, free_port
from kvlane.bench.sizes import count

NAME = "index"
HELP = (
    "a replica of a cluster's index: lookups beside changes, against bare messages; its restart; bytes an entry and "
    "nanoseconds a change"
)
RATIO_GOAL, P99_GOAL_MS, CHANGES_GOAL = 2.0, 1.0, 0.95
RESTART_GOAL_S = 3.0
ENTRY_GOAL, CHANGE_GOAL_NS = 24.0, 60.0
# A lookup whose time is over ends as soon as its daemon's thread gets a processor.
SLACK_MS = 10.0
# dynamo-kv-router 1.6.1, measured on two cores.
PEER = "dynamo-kv-router 1.6.1: 89 B an entry, 156 to 230 ns a change"
PREDICTED = {
    "lookup / message, p50": "1.6",
    "lookup, p99": "1.5 ms: two cores carry the owners, the replica and both sides of the messages",
    "complete after SIGKILL": "0.9 s: 0.2 s until the owners dial again, 0.1 s to join, 1,000 parts",
    "longest wait of a lookup meanwhile": "6 ms",
    "an entry": "20.5 B",
    "a change": "55 ns",
}
"""Written before the first run."""
_SOON_S = 120.0
# A lookup that is timed is not given up.
_PATIENCE_MS = 10_000.0
# A lookup is asked for so long before the replica is killed.
_BEFORE_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench index`."""
    parser.add_argument(
        "--entries", type=count, default=10_000_000, help="of all owners together (default %(default)s)"
    )
    parser.add_argument("--owners", type=count, default=16, help="(default %(default)s)")
    parser.add_argument("--blocks", type=count, default=625, help="keys of a lookup (default %(default)s)")
    parser.add_argument("--rate", type=count, default=1000, help="lookups a second (default %(default)s)")
    parser.add_argument(
        "--changes",
        type=count,
        default=100_000,
        help="a second, of all owners together (default %(default)s)",
    )
    parser.add_argument(
        "--at-a-time",
        type=count,
        default=64,
        help="changes that an owner makes together, such as the blocks that a step of an engine saves and those that "
        "make room (default %(default)s)",
    )
    parser.add_argument("--seconds", type=count, default=20, help="of lookups (default %(default)s)")
    parser.add_argument(
        "--restart-entries",
        type=count,
        default=1_000_000,
        help="while a replica restarts (default %(default)s)",
    )
    parser.add_argument(
        "--restart-owners", type=count, default=3, help="that have them (default %(default)s)"
    )
    parser.add_argument(
        "--restart-seconds",
        type=count,
        default=5,
        help="of lookups around each restart (default %(default)s)",
    )
    parser.add_argument("--restarts", type=count, default=3, help="(default %(default)s)")
    parser.add_argument(
        "--answer-ms",
        type=float,
        default=1.0,
        help="patience of lookups around a restart, as --cluster-answer-ms of the daemon (default %(default)s)",
    )
    add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    smallest = min(
        arguments.entries // arguments.owners, arguments.restart_entries // arguments.restart_owners
    )
    if smallest < 2 * arguments.blocks:
        sys.exit(f"each owner needs {2 * arguments.blocks} entries, twice --blocks, and one has {smallest}")
    with report.CpuWatch() as watch:
        outcome = measure(arguments)
    return publish(arguments, outcome, watch)


class Replica:
    """A `kvlane index` on loopback. Can be started again after it was killed, at the same address."""

    def __init__(self) -> None:
        self.address, self._http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Does not wait until it serves."""
        command = [beside_python("kvlane"), "index", "--listen", self.address, "--http", self._http]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVLANE_")}
        self._process = subprocess.Popen(
            [*command, "--log", "warn"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=inherited,
        )

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Sends SIGKILL, and waits for the end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        """Kills it, for good."""
        self.kill()
        self._log.close()

    def _page(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self._http}{path}", timeout=30) as answer:
            return answer.read().decode()

    def blocks(self) -> list[int]:
        """Blocks of each owner that it follows completely. Empty before it serves."""
        try:
            owners = json.loads(self._page("/owners"))
        except OSError:
            if self._process is not None and self._process.poll() is not None:
                self._log.seek(0)
                raise SystemExit(f"kvlane index ended: {self._log.read().decode().strip()}") from None
            return []
        return [
            owner["blocks"]
            for owner in owners
            if owner["state"] == "following" and not owner["changes_behind"]
        ]

    def metric(self, name: str) -> float:
        """A metric without labels."""
        (line,) = [line for line in self._page("/metrics").splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])


class Cluster:
    """Replicas, owners in name only that share `entries`, and a daemon that asks, which has no blocks."""

    def __init__(self, stack: ExitStack, replicas: int, owners: int, entries: int) -> None:
        self._stack = stack
        self.owners = owners
        self.keys = entries // owners
        self.kept = self.keys // 2
        self.replicas = [Replica() for _ in range(replicas)]
        for replica in self.replicas:
            stack.callback(replica.end)
            replica.start()
        self.addresses = [replica.address for replica in self.replicas]
        self.named = self.child("owners")
        self.named.ask(
            "open", owners=owners, kept=self.kept, turning=self.keys - self.kept, replicas=self.addresses
        )
        self.asker = self.child("asker")

    def child(self, side: str) -> Child:
        """A process of kvlane.bench.index_sides."""
        child = Child(["-m", "kvlane.bench.index_sides", side], {})
        self._stack.callback(child.end)
        return child

    def is_complete(self, replica: Replica) -> bool:
        """Whether it knows all blocks of all owners. The daemon that asks has none."""
        return sorted(replica.blocks()) == [0] + [self.keys] * self.owners

    def wait(self) -> None:
        """Until all know each other, and each replica knows all blocks."""
        for replica in self.replicas:
            until("a replica knows all blocks", lambda replica=replica: self.is_complete(replica))
        wanted = [self.owners, len(self.replicas)]
        until("all know each other", lambda: self.asker.ask("reached") == wanted)

    def ask(self, **facts: Any) -> dict[str, Any]:
        """The arguments of the asker's `ask`."""
        return {"owners": self.owners, "kept": self.kept, **facts}

    def snapshots(self, replica: Replica) -> float:
        """Snapshots that a replica has requested of each owner; the daemon that asks is one, too."""
        return replica.metric("kvlane_index_snapshots_total") / (self.owners + 1)


@contextmanager
def cluster(replicas: int, owners: int, entries: int) -> Iterator[Cluster]:
    """A cluster whose processes end with the block."""
    with ExitStack() as stack:
        yield Cluster(stack, replicas, owners, entries)


def until(what: str, condition: Callable[[], bool]) -> float:
    """Waits for the state of other processes, which send no event: the seconds that it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > _SOON_S:
            raise SystemExit(f"{what}: not within {_SOON_S:.0f} s")
        time.sleep(0.002)
    return time.monotonic() - began


def measure(arguments: argparse.Namespace) -> Outcome:
    """Lookups beside changes, restarts, and the core by itself."""
    found: dict[str, Any] = {}
    figures: list[Figure] = []
    for name, part in (("lookups", _lookups), ("restarts", _restarts), ("core", _core)):
        report.say(f"{name} ..")
        own, found[name] = part(arguments)
        figures += own
    note = (
        f"{arguments.entries} entries of {arguments.owners} owners, {arguments.changes} changes a second, "
        f"{arguments.at_a_time} of an owner at a time, "
        f"{arguments.rate} lookups a second of {arguments.blocks} keys, by a daemon without blocks. Between two "
        "of them goes a message of as many bytes to a process that answers with as many as the replica does. All over "
        "TCP on loopback. The owners have their blocks in name only, and send what changed within 5 ms, as daemons do. "
        f"Restart: {arguments.restart_entries} entries of {arguments.restart_owners} owners, two replicas, lookups "
        f"with {arguments.answer_ms:g} ms of patience; the time from SIGKILL until the replica, started at once, knows "
        f"all. Core: in one thread, without messages; beside it {PEER}. Predicted before the first run: "
        + "; ".join(f"{what}: {value}" for what, value in PREDICTED.items())
        + "."
    )
    return Outcome(NAME, figures, {"predicted": PREDICTED, **found}, note)


def _lookups(arguments: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    with cluster(1, arguments.owners, arguments.entries) as all_of_it:
        (replica,) = all_of_it.replicas
        echo = all_of_it.child("echo")
        pings_from = all_of_it.asker.ask(
            "open", replicas=all_of_it.addresses, answer_ms=_PATIENCE_MS, echo=echo.ask("open")
        )
        echo.ask("answer", asker=pings_from)
        all_of_it.wait()
        named = all_of_it.named
        named.ask("change", a_second=arguments.changes, at_a_time=arguments.at_a_time)
        pids = {
            "replica": replica.pid,
            "owners": named.pid,
            "asking daemon": all_of_it.asker.pid,
            "echo": echo.pid,
        }
        before, cpu, began = named.ask("acknowledged"), _cpu(pids), time.monotonic()
        asked = all_of_it.asker.ask(
            "ask",
            **all_of_it.ask(blocks=arguments.blocks, a_second=arguments.rate, seconds=arguments.seconds),
        )
        seconds = time.monotonic() - began
        changes = (named.ask("acknowledged") - before) / seconds
        used = {name: (after - cpu[name]) / seconds for name, after in _cpu(pids).items()}
        named.ask("change", a_second=0, at_a_time=1)
        # The digests of replica and owners agree after all changes, too.
        until("a replica follows", lambda: len(replica.blocks()) == arguments.owners + 1)
        snapshots = all_of_it.snapshots(replica)
        bytes_an_entry = replica.metric("kvlane_index_bytes") / replica.metric("kvlane_index_entries")
    _check(asked)
    if asked["given_up_us"] or len(asked["pings_us"]) != asked["pings"]:
        raise SystemExit(
            f"of {asked['lookups']} lookups {len(asked['given_up_us'])} found nothing, and of {asked['pings']} "
            f"messages {asked['pings'] - len(asked['pings_us'])} were not answered"
        )
    lookup, message = report.summary(asked["right_us"]), report.summary(asked["pings_us"])
    blocks = arguments.blocks
    figures = [
        Figure(
            f"lookup of {blocks} keys / message of the same bytes, p50",
            lookup["p50"] / message["p50"],
            at_most=RATIO_GOAL,
        ),
        Figure(f"lookup of {blocks} keys, p99", lookup["p99"] / 1e3, "ms", at_most=P99_GOAL_MS),
        Figure(f"lookup of {blocks} keys, p50", lookup["p50"], "us"),
        Figure("message of the same bytes there and back, p50", message["p50"], "us"),
        Figure("message of the same bytes there and back, p99", message["p99"] / 1e3, "ms"),
        Figure("changes meanwhile, of those wanted", changes / arguments.changes, at_least=CHANGES_GOAL),
        Figure("snapshots", snapshots, "an owner", at_most=1.0),
        Figure("the replica's processor time meanwhile", used["replica"], "cores"),
    ]
    details = {
        "lookup_us": lookup,
        "message_us": message,
        "lookups": asked["lookups"],
        "changes_a_second": changes,
        "cores": used,
        "replica_bytes_an_entry": bytes_an_entry,
    }
    return figures, details


def _cpu(pids: dict[str, int]) -> dict[str, float]:
    """Processor seconds of each process, and of the replica's threads that do most."""
    threads = ("kvlane-index", "kvlane-fabric")
    return {name: daemon.cpu_seconds(pid) for name, pid in pids.items()} | {
        f"replica: {thread}": daemon.cpu_seconds(pids["replica"], thread) for thread in threads
    }


def _check(asked: dict[str, Any]) -> None:
    ended = len(asked["right_us"]) + len(asked["given_up_us"]) + asked["wrong"]
    if asked["wrong"]:
        raise SystemExit(f"{asked['wrong']} of {asked['lookups']} lookups found the wrong blocks")
    if ended != asked["lookups"]:
        raise SystemExit(f"{asked['lookups'] - ended} of {asked['lookups']} lookups did not end")


def _restarts(arguments: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    rounds: list[dict[str, Any]] = []
    with cluster(2, arguments.restart_owners, arguments.restart_entries) as all_of_it:
        all_of_it.asker.ask("open", replicas=all_of_it.addresses, answer_ms=arguments.answer_ms)
        for number in range(arguments.restarts):
            all_of_it.wait()
            rounds.append(_restart(all_of_it, all_of_it.replicas[number % 2], arguments))
    given_up = sum(each["given_up"] for each in rounds)
    lookups = sum(each["lookups"] for each in rounds)
    longest = max(each["longest_ms"] for each in rounds)
    figures = [
        Figure(
            "SIGKILL of a replica until it knows all again, longest",
            max(each["complete_s"] for each in rounds),
            "s",
            at_most=RESTART_GOAL_S,
        ),
        Figure(
            "snapshots after a restart", max(each["snapshots"] for each in rounds), "an owner", at_most=1.0
        ),
        Figure("longest wait of a lookup meanwhile", longest, "ms", at_most=arguments.answer_ms + SLACK_MS),
        Figure("lookups meanwhile that were answered", 100 * (1 - given_up / lookups), "%"),
    ]
    return figures, {"rounds": rounds}


def _restart(all_of_it: Cluster, replica: Replica, arguments: argparse.Namespace) -> dict[str, Any]:
    all_of_it.asker.tell(
        "ask",
        **all_of_it.ask(blocks=arguments.blocks, a_second=arguments.rate, seconds=arguments.restart_seconds),
    )
    time.sleep(_BEFORE_S)
    began = time.monotonic()
    replica.kill()
    replica.start()
    until("the replica knows all blocks again", lambda: all_of_it.is_complete(replica))
    complete = time.monotonic() - began
    asked = all_of_it.asker.answer("ask")
    _check(asked)
    return {
        "complete_s": complete,
        "snapshots": all_of_it.snapshots(replica),
        "lookups": asked["lookups"],
        "given_up": len(asked["given_up_us"]),
        "longest_ms": max(asked["right_us"] + asked["given_up_us"]) / 1e3,
        "right_us": report.summary(asked["right_us"]),
        "given_up_us": report.summary(asked["given_up_us"]),
    }


def _core(arguments: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    core = dict(_bench.index_core(arguments.entries))
    figures = [
        Figure("core: an entry", core["table_bytes_an_entry"], "B", at_most=ENTRY_GOAL),
        Figure("core: a change, p50", core["change_ns_p50"], "ns", at_most=CHANGE_GOAL_NS),
        Figure("core: lookup of 625 keys, p50", core["lookup_hit_us_p50"], "us"),
    ]
    return figures, core
