"""The processes that `kvlane bench index` starts beside the replicas: owners, a daemon that asks, an echo."""

from __future__ import annotations

import sys

from kvlane import _bench
from kvlane.bench.children import serve_commands


class OwnersSide:
    """Owners that announce blocks which they have in name only."""

    def open(self, owners: int, kept: int, turning: int, replicas: list[str]) -> None:
        """They join these replicas, each with `kept` blocks that stay and `turning` ones that changes replace."""
        self.owners = _bench.IndexOwners(owners, kept, turning, replicas)

    def change(self, a_second: float, at_a_time: int) -> None:
        """All owners together make so many changes a second from now on, each so many at a time."""
        self.owners.change(a_second, at_a_time)

    def acknowledged(self) -> int:
        """Changes that replicas have acknowledged."""
        return self.owners.acknowledged()


class AskerSide:
    """A daemon that only asks."""

    def open(self, replicas: list[str], answer_ms: float, echo: str | None = None) -> str | None:
        """It joins these replicas, and gives lookups up after so long. Returns where its pings come from."""
        self.lookups = _bench.IndexLookups(replicas, answer_ms, echo)
        return self.lookups.pings_from

    def reached(self) -> tuple[int, int]:
        """The number of owners and of replicas that it has reached."""
        return self.lookups.reached()

    def ask(self, owners: int, kept: int, blocks: int, a_second: float, seconds: float) -> dict[str, object]:
        """Asks for prompts, and waits for the end of all lookups. Times in microseconds."""
        asked = self.lookups.ask(owners, kept, blocks, a_second, seconds)
        names = ("lookups", "right_us", "given_up_us", "wrong", "pings", "pings_us")
        return dict(zip(names, asked, strict=True))


class EchoSide:
    """Answers messages at once."""

    def open(self) -> str:
        """Returns its address."""
        self.echo = _bench.IndexEcho()
        return self.echo.address

    def answer(self, asker: str) -> None:
        """Answers the engine at this address."""
        self.echo.answer(asker)


SIDES = {"owners": OwnersSide, "asker": AskerSide, "echo": EchoSide}

if __name__ == "__main__":
    sys.exit(serve_commands(SIDES[sys.argv[1]]()))
