"""Makes helpers of other tests importable: the connector's tiny model and daemon, the router. Two served engines for
the tests of several files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("connector", "router", "daemon"))]

from shared_pair import SharedPair  # noqa: E402


@pytest.fixture(scope="session")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPair]:
    made = SharedPair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()
