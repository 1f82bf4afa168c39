"""Passes the core's log messages to Python's logging.

The core's threads put messages into a queue. A thread here takes them out, because the engine may be idle for hours.
"""

from __future__ import annotations

import os
import threading

from kvlane.connector.core_protocols import LogSource
from kvlane.connector.guard import logger

_lock = threading.Lock()
_started_in: int | None = None


def start(core: LogSource) -> None:
    """Starts the thread, once a process; `core` is `kvlane._core`."""
    global _started_in
    with _lock:
        if _started_in == os.getpid():
            return
        ready = core.log_descriptor()
        threading.Thread(target=_forward, args=(core, ready), name="kvlane-log", daemon=True).start()
        _started_in = os.getpid()


def _forward(core: LogSource, ready: int) -> None:
    while True:
        # The eventfd counts messages; reading it sets it to 0 again.
        os.read(ready, 8)
        messages, missed = core.take_log()
        for level, message in messages:
            logger.log(level, "%s", message)
        if missed:
            # Log: lines of kvlane's core are missing from this log; all else works.
            logger.warning("kvlane: %d messages came too fast to be logged", missed)
