"""Ranks as processes of their own, each with a function of `rank_work`. Their all-gather goes over pipes to here."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

PATIENCE_S = 60.0


def _rank(rank: int, size: int, pipe: Connection, work: str, arguments: tuple[Any, ...]) -> None:
    import rank_work

    from kvlane.moe import Group

    def all_gather(told: bytes) -> list[bytes]:
        pipe.send(("gather", told))
        return pipe.recv()

    def say(event: str) -> None:
        pipe.send(("event", event))

    try:
        result = getattr(rank_work, work)(Group(rank, size, all_gather), say, *arguments)
    except Exception as error:  # noqa: BLE001 - it is the result
        result = (type(error).__name__, str(error))
    pipe.send(("done", result))


@dataclass
class Ranks:
    """`size` processes that have begun `work`."""

    size: int
    work: str
    arguments: tuple[Any, ...] = ()
    results: dict[int, Any] = field(default_factory=dict)
    events: list[tuple[int, str]] = field(default_factory=list)
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._gathered: dict[int, bytes] = {}
        self._pipes: dict[int, Connection] = {}
        self.processes: list[SpawnProcess] = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, self.size, theirs, self.work, self.arguments), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes[rank] = ours
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def until(self, event: str, count: int) -> None:
        """Returns when so many ranks have said this."""
        self._serve(lambda: sum(said == event for _, said in self.events) >= count)

    def done(self, ranks: int | None = None) -> dict[int, Any]:
        """The result of each rank, once so many have one."""
        self._serve(lambda: len(self.results) >= (self.size if ranks is None else ranks))
        return self.results

    def _serve(self, is_over: Any) -> None:
        end = time.monotonic() + self.patience_s
        while not is_over():
            ready = wait(list(self._pipes.values()), timeout=max(0.0, end - time.monotonic()))
            assert ready, f"nothing for {self.patience_s} s; events {self.events}, results {self.results}"
            for rank, pipe in list(self._pipes.items()):
                if pipe in ready:
                    self._heard(rank, pipe)

    def _heard(self, rank: int, pipe: Connection) -> None:
        try:
            kind, told = pipe.recv()
        except EOFError:
            del self._pipes[rank]
            return
        if kind == "gather":
            self._gathered[rank] = told
            if len(self._gathered) == self.size:
                everything = [self._gathered[each] for each in range(self.size)]
                self._gathered = {}
                for each in self._pipes.values():
                    each.send(everything)
        elif kind == "event":
            self.events.append((rank, told))
        else:
            self.results[rank] = told


def run(size: int, work: str, *arguments: Any) -> list[Any]:
    """The results of all ranks, in their order."""
    with Ranks(size, work, arguments) as ranks:
        results = ranks.done()
        return [results[rank] for rank in range(size)]
