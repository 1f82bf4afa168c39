"""The scheduler role's connection to the daemon, kept alive once a step, and the daemon's runs that it has left."""

from __future__ import annotations

from collections.abc import Callable

from kvlane.connector.core_protocols import SchedulerCore

# After this time without a step the connection ticks before a hit is promised, because an idle worker unmaps the pool
# of a dead daemon after a minute.
TICK_BEFORE_PROMISE_SECONDS = 1.0


class Connection:
    """The connection to the daemon's runs, one after the other. A boot id identifies a run."""

    def __init__(self, core: SchedulerCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._ticked_at = clock()
        self._boot: bytes | None = None
        self._gone: list[bytes] = []

    def tick(self) -> None:
        """Called once a step: reconnects, and sends and reads what is due. Never blocks."""
        self._core.tick()
        self._ticked_at = self._clock()

    def tick_if_idle(self) -> None:
        """Ticks if the last step was long ago."""
        if self._clock() - self._ticked_at >= TICK_BEFORE_PROMISE_SECONDS:
            self.tick()

    def take_restart(self) -> bool:
        """True once for each new run of the daemon after the first. A new run has nothing stored."""
        boot = self._core.boot
        if boot is None or boot == self._boot:
            return False
        before, self._boot = self._boot, boot
        return before is not None

    def take_newly_gone(self) -> list[bytes] | None:
        """The runs that were left, if they changed since the last call; else None."""
        gone = self._core.gone
        if gone == self._gone:
            return None
        self._gone = gone
        return gone

    @property
    def over(self) -> list[bytes]:
        """The runs that were left and have ended: there is no way back to them."""
        return self._core.over if self._gone else []

    @property
    def boot(self) -> bytes | None:
        """The daemon's present run; None while there is no connection."""
        return self._core.boot
