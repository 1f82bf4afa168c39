"""Network namespaces that stand for hosts: no root is needed, only `unshare`, `nsenter` and `ip`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

NEAR, FAR = "10.79.0.1", "10.79.0.2"
_UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--"]
_INSIDE = "KVLANE_DEMO_INSIDE"


def enter() -> str | None:
    """Goes on in a network namespace of its own: this program starts anew there. Returns a sentence if that is not
    possible, and None within the namespace."""
    if os.environ.get(_INSIDE):
        _ip("link set lo up")
        return None
    try:
        tried = subprocess.run([*_UNSHARE, "ip", "link", "show"], capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"needs {error.filename}, of util-linux"
    if tried.returncode:
        return f"needs network namespaces, and ip of iproute2: {tried.stderr.strip()}"
    environment = os.environ | {_INSIDE: "1"}
    return os.execvpe(_UNSHARE[0], [*_UNSHARE, sys.executable, *sys.orig_argv[1:]], environment)


class OtherHost:
    """A second network namespace, joined with this one by a wire. As a context it is gone at its end."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(["unshare", "--net", "--", "sleep", "infinity"])
        self.inside = ["nsenter", "--target", str(self._holder.pid), "--net", "--"]
        """A command that starts another one there."""

    def __enter__(self) -> OtherHost:
        own = os.readlink("/proc/self/ns/net")
        there = Path(f"/proc/{self._holder.pid}/ns/net")
        deadline = time.monotonic() + 10
        while os.readlink(there) == own:
            if time.monotonic() > deadline:
                raise OSError("the second network namespace was not made within 10 s")
            time.sleep(0.01)
        _ip(f"link add near type veth peer name far netns {self._holder.pid}")
        _ip(f"address add {NEAR}/24 dev near")
        _ip("link set near up")
        for command in (f"address add {FAR}/24 dev far", "link set far up", "link set lo up"):
            _ip(command, self.inside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.kill()
        self._holder.wait()


def _ip(arguments: str, inside: list[str] | None = None) -> None:
    subprocess.run([*(inside or []), "ip", *arguments.split()], check=True)
