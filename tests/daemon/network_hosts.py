"""Hosts without root: each is a network namespace, and each two are joined by a wire of their own.

A test with the mark `hosts` runs once more in a user and network namespace, as its root.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import pytest

NAMESPACE = ["unshare", "--user", "--map-root-user", "--net", "--"]
INSIDE = "KVLANE_TEST_HOSTS"
# Most seconds of a test there.
SECONDS = 3000
# Where no host is.
NOBODY = "02:00:00:00:00:fe"


class MarkedTests:
    """Runs tests that are marked so in namespaces."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        if pyfuncitem.get_closest_marker("hosts") is None or INSIDE in os.environ:
            return None
        if (why := _refusal()) is not None:
            pytest.skip(
                f"needs unshare and nsenter of util-linux, ip of iproute2, and user namespaces: {why}"
            )
        test = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-s", pyfuncitem.nodeid]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(
            [*NAMESPACE, *test],
            cwd=Path(str(pyfuncitem.config.rootpath)),
            env=environment | {INSIDE: "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
        print(done.stdout)
        return True


def _refusal() -> str | None:
    """Why there are no such namespaces here."""
    try:
        tried = subprocess.run([*NAMESPACE, "ip", "link", "show"], capture_output=True, text=True, timeout=30)
    except OSError as error:
        return str(error)
    return None if tried.returncode == 0 else tried.stderr.strip()


class Hosts:
    """Some hosts. As a context they are gone at its end, once their processes are."""

    def __init__(self, count: int) -> None:
        self.addresses = [f"10.80.0.{number + 1}" for number in range(count)]
        self._holders = [
            subprocess.Popen(["unshare", "--net", "--", "sleep", "infinity"]) for _ in self.addresses
        ]
        self.inside = [["nsenter", "--target", str(holder.pid), "--net", "--"] for holder in self._holders]
        """For each host, a command that starts another one there."""

    def __enter__(self) -> Hosts:
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        for holder in self._holders:
            while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
                assert time.monotonic() < deadline, "a network namespace was not made within 10 s"
                time.sleep(0.01)
        for number, address in enumerate(self.addresses):
            self._ip(number, "link set lo up", f"address add {address}/32 dev lo")
        for one, other in itertools.combinations(range(len(self.addresses)), 2):
            far = self._holders[other].pid
            self._ip(one, f"link add {wire(one, other)} type veth peer name {wire(other, one)} netns {far}")
            self.plug_in(one, other)
            self.plug_in(other, one)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def unplug(self, one: int, other: int) -> None:
        """The first host has no more way to the other one. To that one the wire looks dead."""
        self._ip(one, f"link set {wire(one, other)} down")

    def plug_in(self, one: int, other: int) -> None:
        source, target = self.addresses[one], self.addresses[other]
        name = wire(one, other)
        self._ip(one, f"link set {name} up", f"route add {target}/32 dev {name} src {source}")

    def drop_all(self, one: int, other: int) -> None:
        """From now on the wire between two hosts loses everything. Neither sees a reason."""
        for near, far in ((one, other), (other, one)):
            name = wire(near, far)
            self._ip(near, f"neigh replace {self.addresses[far]} lladdr {NOBODY} nud permanent dev {name}")

    def mend(self, one: int, other: int) -> None:
        for near, far in ((one, other), (other, one)):
            self._ip(near, f"neigh del {self.addresses[far]} dev {wire(near, far)}")

    def _ip(self, host: int, *commands: str) -> None:
        command = [*self.inside[host], "ip", "-batch", "-"]
        subprocess.run(command, input="\n".join(commands) + "\n", text=True, check=True)


def wire(here: int, there: int) -> str:
    return f"wire{here}to{there}"
