"""Where the connector gets its core."""

import pytest

from kvlane.connector.core import open_core
from kvlane.connector.groups import Unsupported


def test_a_variable_that_names_tcp_is_no_daemon_for_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine connected to it again and again, and the daemon refused each time. The variable may be there for
    tools, so the engine starts, and its log says what to do."""
    monkeypatch.setenv("KVLANE_ADDR", "127.0.0.1:9000")
    with pytest.raises(Unsupported, match=r"KVLANE_ADDR is '127.0.0.1:9000', a TCP address.*write unix:PATH"):
        open_core(None)
    assert open_core("unix:/run/kvlane.sock").Scheduler, "what the engine's configuration says comes first"
    for usable in ("unix:/run/kvlane.sock", "/run/kvlane.sock", ""):
        monkeypatch.setenv("KVLANE_ADDR", usable)
        assert open_core(None).Scheduler
