"""The core of an engine without a daemon: direct hand-offs work, and nothing is looked up, saved or loaded."""

from __future__ import annotations

import stat
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kvlane.connector.core_protocols import EndedRequest, SaveWait
from kvlane.connector.guard import logger
from kvlane.connector.settings import Settings


def uses_daemon(settings: Settings) -> bool:
    """Whether this engine uses a daemon. Looks for the default socket if the settings leave it open."""
    if settings.needs_daemon():
        return True
    if settings.daemon == "off":
        return False
    from kvlane import _core

    with suppress(OSError, ValueError):
        path = Path(_core.default_address().removeprefix("unix:"))
        return stat.S_ISSOCK(path.stat().st_mode)
    return False


class NoScheduler:
    """Takes the place of a scheduler's connection if the engine uses no daemon. Counts nothing as unavailable."""

    ready = False
    boot = None
    pool_bytes = 0
    is_recorded = False
    run = b""
    engine_id = ""

    def __init__(self) -> None:
        self.gone: list[bytes] = []
        self.over: list[bytes] = []
        # Log: `kvlane.direct` is on and no daemon was named or found at the default socket. Do: set
        # `kvlane.address` if the engine shall use a daemon too.
        logger.info(
            "kvlane: this engine hands prompts over directly and uses no daemon; kvlane.daemon or kvlane.address "
            "says if it should"
        )

    def lookup_start(
        self,
        request_id: str,
        hashes: list[list[bytes]],
        max_tokens: int,
        handoff: SaveWait | None = None,
        tokens_per_s: int = 0,
        number: int = 0,
        again: bool = False,
        traceparent: str = "",
    ) -> NoReturn:
        raise AssertionError("an engine without a daemon looks nothing up")

    def requests_ended(self, requests: list[EndedRequest], /) -> None:
        pass

    def lookup_poll(self, request_id: str, wait_us: int = 0) -> NoReturn:
        raise AssertionError("an engine without a daemon looks nothing up")

    def forget(self, request_id: str) -> None:
        pass

    def release(self, boot: bytes, lease: int) -> None:
        pass

    def tick(self) -> None:
        pass

    def cancel_saves(self, up_to_job: int, timeout_ms: float = 1000.0) -> bool:
        return True

    def take_changes(self) -> tuple[bool, list[tuple[int, bytes, bool]]]:
        return False, []

    def take_stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass
