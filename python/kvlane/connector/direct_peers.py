"""The addresses to which this engine connects for direct hand-offs.

Requests name addresses, and clients write requests. So the engine connects only to other engines of its user, which
leave their addresses in the user's runtime folder, and to networks that `kvlane.direct.peers` names.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvlane import _core

SUFFIX = ".direct"


def publish(address: str, pid: int) -> Path | None:
    """Leaves the address for this user's other engines, and returns its file. None if the runtime folder is not this
    user's alone: then `kvlane.direct.peers` has to name this engine."""
    with suppress(OSError):
        place = _core.runtime_folder()
        _tidy(place)
        new = place / f".{pid}{SUFFIX}.new"
        new.write_text(address)
        return new.rename(place / f"{pid}-{address.rpartition(':')[2]}{SUFFIX}")
    return None


def withdraw(file: Path) -> None:
    """Remove the file that `publish` made. Another engine of this process keeps its own file."""
    with suppress(OSError):
        file.unlink()


def _tidy(place: Path) -> None:
    """Removes the files of engines whose process is gone."""
    for file in place.glob(f"*{SUFFIX}"):
        pid = file.name.partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with suppress(OSError):
                file.unlink()


def published() -> set[str]:
    """The addresses that this user's engines have left."""
    found: set[str] = set()
    with suppress(OSError):
        for file in _core.runtime_folder().glob(f"*{SUFFIX}"):
            with suppress(OSError, UnicodeDecodeError):
                found.add(file.read_text()[:128])
    return found


class Peers:
    """The addresses to which this engine may connect."""

    def __init__(self, named: Iterable[str]) -> None:
        """`named`: networks as `10.0.0.0/8`, or one address. Raises ValueError."""
        networks = [ipaddress.ip_network(each, strict=False) for each in named]
        self.networks = [(network.network_address, network.prefixlen) for network in networks]
        self._networks = networks

    def allows(self, address: str) -> bool:
        """Whether this engine may connect to HOST:PORT, the host as a number."""
        host, _, port = address.rpartition(":")
        with suppress(ValueError):
            number = ipaddress.ip_address(host.strip("[]"))
            # An interface's name behind `%` means something only to the host's resolver.
            if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536 or "%" in host:
                return False
            if any(number in network for network in self._networks):
                return True
            return number.is_loopback and address in published()
        return False
