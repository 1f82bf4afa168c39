"""Network namespaces that stand for hosts: it takes `unshare`, `nsenter` and `ip`, no root, and `tc` to pace a wire."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

NEAR = "10.79.0.1"
_FIRST_FAR = 2
_UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--"]
_INSIDE = "KVLANE_DEMO_INSIDE"
# Bytes of a full Ethernet frame, and those of TCP's payload in it. A paced wire counts the former.
_FRAME, _PAYLOAD = 1514, 1448


def refusal() -> str | None:
    """Why this process cannot make network namespaces, or None."""
    try:
        tried = subprocess.run([*_UNSHARE, "ip", "link", "show"], capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"needs {error.filename}, of util-linux"
    return (
        f"needs network namespaces, and ip of iproute2: {tried.stderr.strip()}" if tried.returncode else None
    )


def enter() -> str | None:
    """Goes on in a network namespace of its own: this program starts anew there. Returns a sentence if that is not
    possible, and None within the namespace."""
    if os.environ.get(_INSIDE):
        _ip("link set lo up")
        return None
    if refused := refusal():
        return refused
    environment = os.environ | {_INSIDE: "1"}
    return os.execvpe(_UNSHARE[0], [*_UNSHARE, sys.executable, *sys.orig_argv[1:]], environment)


class OtherHost:
    """Another network namespace, joined with this one by a wire of its own. This one is `NEAR` at every wire. As a
    context it is gone at its end."""

    def __init__(self, number: int = 0) -> None:
        self.address = f"10.79.0.{_FIRST_FAR + number}"
        self._near = f"near{number}"
        self._holder = subprocess.Popen(["unshare", "--net", "--", "sleep", "infinity"])
        self.inside = ["nsenter", "--target", str(self._holder.pid), "--net", "--"]
        """A command that starts another one there."""

    def __enter__(self) -> OtherHost:
        own = os.readlink("/proc/self/ns/net")
        there = Path(f"/proc/{self._holder.pid}/ns/net")
        deadline = time.monotonic() + 10
        while os.readlink(there) == own:
            if time.monotonic() > deadline:
                raise OSError("another network namespace was not made within 10 s")
            time.sleep(0.01)
        _ip(f"link add {self._near} type veth peer name far netns {self._holder.pid}")
        _ip(f"address add {NEAR} peer {self.address} dev {self._near}")
        _ip(f"link set {self._near} up")
        for command in (
            f"address add {self.address} peer {NEAR} dev far",
            "link set far up",
            "link set lo up",
        ):
            _ip(command, self.inside)
        return self

    def pace(self, bytes_per_s: float) -> None:
        """Lets so many bytes of TCP's payload a second leave that host. OSError with a sentence if that fails."""
        bits = round(8 * bytes_per_s * _FRAME / _PAYLOAD)
        self._tc(f"replace dev far root tbf rate {bits}bit burst 1mb latency 20ms")

    def unpace(self) -> None:
        """Lets as many leave as can."""
        self._tc("delete dev far root")

    def _tc(self, arguments: str) -> None:
        command = [*self.inside, "tc", "qdisc", *arguments.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"the wire cannot be paced: {done.stderr.strip()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.kill()
        self._holder.wait()


def _ip(arguments: str, inside: list[str] | None = None) -> None:
    subprocess.run([*(inside or []), "ip", *arguments.split()], check=True)
