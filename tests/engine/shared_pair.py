"""Two served engines on one daemon, which tests of several files share: each engine is three processes that import
vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from served import Daemon, ServedEngine, wait_for
from tiny_model import build_tiny_model

from kvlane.bench.processes import connector_config

# A busy machine may leave a lookup unanswered for longer than users want to wait: with twenty processes on two cores 3
# of 40 were misses.
LOOKUP_TIMEOUT_MS = 10_000.0


@dataclass(frozen=True)
class Served:
    """All processes but the router."""

    daemon: Daemon
    engines: tuple[ServedEngine, ServedEngine]


class SharedPair:
    """Starts them when they are first asked for, and again after a test that has killed one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = 0
        self._served: Served | None = None

    def whole(self) -> Served:
        """Both engines answer, and the daemon knows their workers. A test counts from here on, not from 0."""
        if self._served is None or any(each.process.poll() is not None for each in self._served.engines):
            self.close()
            self._served = self._start()
        return self._served

    def _start(self) -> Served:
        self._starts += 1
        folder = self._folder / str(self._starts)
        folder.mkdir()
        model = build_tiny_model(folder / "tiny")
        daemon = Daemon(folder)
        transfer = connector_config(daemon.address, lookup_timeout_ms=LOOKUP_TIMEOUT_MS)
        first, second = (
            ServedEngine(model, daemon.address, folder / f"engine-{number}.log", transfer=transfer)
            for number in range(2)
        )
        served = Served(daemon, (first, second))
        try:
            for each in served.engines:
                each.wait()
            wait_for("both engines' workers", lambda: len(daemon.sessions("worker")) == 2)
        except BaseException:
            _end(served)
            raise
        return served

    def close(self) -> None:
        """End them."""
        if self._served is not None:
            _end(self._served)
            self._served = None


def _end(served: Served) -> None:
    for each in served.engines:
        each.close()
    served.daemon.close()
