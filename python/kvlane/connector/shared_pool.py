"""Publishes in vLLM's metrics which pool this engine shares: its daemon's run, and the space of its blocks there.

    scheduler: {"daemon": run, "blocks": namespaces and weights, "workers": 2} --.
    rank 0:    {"0": its layouts} -----------------------------------------------+--> vllm:kvlane_pool_info
    rank 1:    {"1": its layouts} -----------------------------------------------'

Engines of one run and space load each other's blocks. A router reads the metric, and sends a prompt to any of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvlane.connector.connection import Connection
from kvlane.connector.digest import digest16
from kvlane.connector.known_weights import KnownWeights
from kvlane.connector.shape import EngineShape

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric

NAME = "vllm:kvlane_pool_info"
DOCUMENTATION = "1: the daemon's run, and the space there, that the engine loads from; 0: a former one"
LABELS = ["daemon", "space"]
# The key of a part among the connector's stats.
POOL = "pool"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
# An engine without requests steps for this time after its start, until it finds its daemon. So all engines of a daemon
# publish it before their first request.
START_SECONDS = 2.0
# Each part is published again after this time: vLLM sends it to one of its API servers, and each of them has a metric.
AGAIN_SECONDS = 5.0
Part = dict[str, str]


class SchedulerPart:
    """The scheduler's part: the daemon's run, the namespaces and the weights."""

    def __init__(
        self, connection: Connection, shape: EngineShape, weights: KnownWeights, clock: Callable[[], float]
    ) -> None:
        self._connection = connection
        self._shape = shape
        self._weights = weights
        self._clock = clock
        self._started: float | None = None
        self._has_found = False
        self._sent: Part | None = None
        self._again_at = 0.0

    def _present(self) -> Part:
        # The engine looks nothing up until the weights are known.
        loads = self._shape.can_load and self._weights.are_known
        boot = self._connection.boot if loads else None
        self._has_found = self._has_found or boot is not None
        key = self._weights.key
        blocks = [each.hex() for each in self._shape.namespaces] + [key.hex() if key else ""]
        return {
            "daemon": boot.hex() if boot else "",
            "blocks": digest16(blocks).hex(),
            "workers": str(self._shape.workers),
        }

    def take(self) -> Part | None:
        """The part, if it has changed since the last call or is due again."""
        present, now = self._present(), self._clock()
        if present == self._sent and now < self._again_at:
            return None
        self._sent, self._again_at = present, now + AGAIN_SECONDS
        return present

    def is_due(self) -> bool:
        """Whether the engine has to step without a request, to publish a change."""
        if not self._shape.can_load or not self._shape.has_daemon:
            return False
        if self._started is None:
            self._started = self._clock()
        present = self._present()
        if present["daemon"]:
            return present != self._sent
        return not self._has_found and self._clock() - self._started < START_SECONDS


class WorkerPart:
    """A rank's part: the layouts of its blocks."""

    def __init__(self, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank = rank
        self._clock = clock
        self._part: Part | None = None
        self._again_at = 0.0

    def attached(self, layouts: Sequence[bytes]) -> None:
        """The rank's blocks are cut like this, by group."""
        self._part = {str(self._rank): digest16([each.hex() for each in layouts]).hex()}
        self._again_at = 0.0

    def take(self) -> Part | None:
        """The part, if it has changed since the last call or is due again."""
        now = self._clock()
        if self._part is None or now < self._again_at:
            return None
        self._again_at = now + AGAIN_SECONDS
        return self._part


class PoolInfo:
    """The metric of one engine, put together from all parts."""

    def __init__(self, gauge: PromMetric, labels: Sequence[object]) -> None:
        self._gauge = gauge
        self._labels = labels
        self._parts: Part = {}
        self._shown: tuple[str, str] | None = None

    def hear(self, part: Part) -> None:
        """Merges a part, and updates the metric if that changes it."""
        self._parts.update(part)
        named = self._named()
        if named == self._shown:
            return
        if self._shown is not None:
            labels = [*self._labels, *self._shown]
            self._gauge.labels(*labels).set(0)
            # Removes the former series, because an engine whose weights change often would leave many. With several
            # processes (PROMETHEUS_MULTIPROC_DIR), and with Ray, they stay, as 0.
            if hasattr(self._gauge, "remove") and MULTIPROCESS not in os.environ:
                self._gauge.remove(*labels)
        if named is not None:
            self._gauge.labels(*self._labels, *named).set(1)
        self._shown = named

    def _named(self) -> tuple[str, str] | None:
        """Daemon and space, if all parts have come; else None."""
        ranks = [self._parts.get(str(rank)) for rank in range(int(self._parts.get("workers", 0)))]
        daemon = self._parts.get("daemon")
        if not daemon or None in ranks:
            return None
        return daemon, digest16([self._parts["blocks"], *ranks]).hex()
