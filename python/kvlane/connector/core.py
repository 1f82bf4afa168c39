"""Opens the connector's core: the Rust module, or, for `fake:NAME` addresses, the in-process stand-in."""

from __future__ import annotations

import os

from kvlane.connector.core_protocols import Core
from kvlane.connector.groups import Unsupported
from kvlane.connector.settings import refuse_tcp

FAKE = "fake:"


def open_core(address: str | None) -> Core:
    """Opens the connection to the daemon, for both roles.

    Raises Unsupported where KVLANE_ADDR has to name the daemon and names what no engine can use. Unlike a key of the
    engine's configuration it may be meant for tools.
    """
    if address is not None and address.startswith(FAKE):
        from kvlane.testing import FakeCore

        return FakeCore.named(address[len(FAKE) :])
    from kvlane import _core
    from kvlane.connector import core_log

    shared = os.environ.get("KVLANE_ADDR")
    if address is None and shared:
        try:
            refuse_tcp("KVLANE_ADDR", shared)
        except ValueError as error:
            raise Unsupported(str(error)) from None

    core_log.start(_core)
    return _core
