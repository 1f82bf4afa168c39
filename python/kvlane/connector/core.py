"""Where the connector gets its core: the Rust module, or, for `fake:NAME` addresses, the in-process stand-in."""

from __future__ import annotations

from typing import Any

FAKE = "fake:"


def open_core(address: str | None) -> Any:
    """A namespace with `Scheduler` and `Worker`, as described in `kvlane/_core.pyi`."""
    if address is not None and address.startswith(FAKE):
        from kvlane.testing import FakeCore

        return FakeCore.named(address[len(FAKE) :])
    from kvlane import _core
    from kvlane.connector import core_log

    core_log.start(_core)
    return _core
