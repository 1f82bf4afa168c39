"""Daemons that lend each other blocks, for `kvlane bench remote`: the borrower on this host, owners on others."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from kvlane.bench import daemon, network
from kvlane.bench.processes import beside_python, free_port
from kvlane.bench.replica import Replica
from kvlane.fabric import Tls

_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Host:
    """Where a daemon runs."""

    address: str
    inside: tuple[str, ...] = ()
    """A command that starts another one there."""
    other: network.OtherHost | None = None
    """None: it is this host."""


HERE = Host("127.0.0.1")


class Member:
    """A daemon of a cluster. It can be stopped, killed, and started again at its addresses."""

    def __init__(self, pool_bytes: int, flags: Sequence[str], address: str, inside: Sequence[str]) -> None:
        self.address = address
        self._pool_bytes, self._flags, self._inside = pool_bytes, flags, inside
        self._stack = ExitStack()
        self._is_stopped = False
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        # As the processes of bare READs and of peers have.
        running = daemon.running(
            self._pool_bytes, *self._flags, address=self.address, inside=self._inside, own_session=True
        )
        self.daemon = self._stack.enter_context(running)

    def stop(self) -> None:
        """SIGSTOP."""
        self._is_stopped = True
        os.kill(self.daemon.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._is_stopped = False
        os.kill(self.daemon.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(self.daemon.pid, signal.SIGKILL)
        self._stack.close()

    def restart(self) -> None:
        """Ends it in good order, and starts it again."""
        self._stack.close()
        self.start()

    def close(self) -> None:
        """Ends it in good order, if it still runs."""
        if self._is_stopped:
            self.go_on()
        self._stack.close()

    @property
    def cluster(self) -> dict[str, Any]:
        """What it says of its cluster."""
        command = [beside_python("kvlane"), "status", "--json", "--addr", self.address]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"kvlane status: {done.stderr.strip()}")
        return json.loads(done.stdout)["cluster"]

    def wait_until_reached(self, count: int, replicas: int) -> None:
        """Waits until it is connected with so many others. OSError after a minute."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            cluster = self.cluster
            reached = [sum(each["is_reached"] for each in cluster[kind]) for kind in ("members", "replicas")]
            if reached[0] >= count and reached[1] >= replicas:
                return
            if time.monotonic() > deadline:
                raise OSError(
                    f"a daemon does not reach the others: {cluster['members']}, {cluster['replicas']}"
                )
            time.sleep(0.02)


class Cluster:
    """A borrower, and owners that it asks. As a context they are ended."""

    def __init__(
        self,
        borrower: Host,
        owners: Sequence[Host],
        pool_bytes: int,
        *,
        tls: Tls | None = None,
        flags: Sequence[str] = (),
        of_borrower: Sequence[str] = (),
        replicas: int = 0,
    ) -> None:
        """`flags` are those of all daemons, `of_borrower` further ones. Replicas run on the host of the first owner.
        With any, daemons ask one of these instead of each other."""
        self._stack = ExitStack()
        hosts = [borrower, *owners]
        ports = [f"{host.address}:{free_port()}" for host in hosts]
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvlane-")))
            token = folder / "token"
            token.touch(0o600)
            token.write_text(secrets.token_hex(32))
            shared = [*flags, "--cluster-token-file", str(token), "--cluster-transport", "tcp"]
            if tls is not None:
                shared += ["--cluster-tls-certificate", str(tls.certificate)]
                shared += ["--cluster-tls-key", str(tls.key), "--cluster-tls-authority", str(tls.authority)]
            at = owners[0]
            proof = ["--token-file", str(token), "--log", "warn"]
            self.replicas = [
                Replica(f"{at.address}:{free_port()}", proof, at.inside) for _ in range(replicas)
            ]
            for replica in self.replicas:
                replica.start()
                self._stack.callback(replica.close)
            index = ",".join(replica.address for replica in self.replicas)
            members = []
            for number, host in enumerate(hosts):
                peers = ports[1:] if number == 0 else ports[:1]
                directory = ["--index", index] if index else ["--peers", ",".join(peers)]
                own = [*directory, "--cluster-listen", ports[number], *shared]
                own += of_borrower if number == 0 else ()
                members.append(Member(pool_bytes, own, f"unix:{folder}/{number}.sock", host.inside))
                self._stack.callback(members[-1].close)
            self.borrower, *self.owners = members
            self.wait_until_reached()
        except BaseException:
            self._stack.close()
            raise

    def wait_until_reached(self) -> None:
        """Waits until all reach each other. OSError after a minute."""
        for member in (self.borrower, *self.owners):
            others = len(self.owners) if member is self.borrower or self.replicas else 1
            member.wait_until_reached(others, len(self.replicas))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


@dataclass(frozen=True)
class Peer:
    """Another system that brings the same bytes from the owner's host."""

    opens: Callable[[Settings], AbstractContextManager[Callable[[], float]]]
    """Starts it, and gives a function that brings all bytes once and returns the seconds. OSError if that fails."""
    missing: Callable[[], str | None]
    """Why it cannot be measured here; None if it can."""
    install: str
    goal: float
    """The least ratio of a fetch's rate to its own."""


@dataclass(frozen=True)
class Settings:
    """What all parts of `kvlane bench remote` share."""

    here: Host
    owners: tuple[Host, Host]
    bytes: int
    """Of one fetch."""
    block_bytes: int
    rounds: int
    lookups: int
    """In a phase."""
    seconds: float
    """Of a phase in which an owner lends."""
    answer_ms: int | None = None
    """How long daemons wait for each other's answers; None: as they do by themselves."""
    peers: Mapping[str, Peer] = field(default_factory=dict)
    """Those that can be measured here."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the daemons whose lookups are measured."""
        return () if self.answer_ms is None else ("--cluster-answer-ms", str(self.answer_ms))

    @property
    def blocks(self) -> int:
        """Blocks of one fetch."""
        return max(self.bytes // self.block_bytes, 2)

    @property
    def pool_bytes(self) -> int:
        """Of a daemon that lends or borrows them: copies of others' blocks are evicted only if the pool is full."""
        return 2 * self.blocks * self.block_bytes + (64 << 20)
