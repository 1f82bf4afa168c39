"""How two processes of pytest share the tests of engines (`-n 2 --dist loadfile`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

LONGEST_FIRST = (
    "tests/engine/test_route_pd.py",
    "tests/engine/test_served.py",
    "tests/connector/test_vllm_direct.py",
    "tests/connector/test_vllm_direct_hosts.py",
    "tests/engine/test_start_page.py",
    "tests/connector/test_vllm_engine.py",
    "tests/connector/test_vllm_weights.py",
    "tests/connector/test_vllm_engine_identity.py",
    "tests/engine/test_basic_example.py",
    "tests/connector/test_vllm_chaos.py",
    "tests/connector/test_vllm_engine_packing.py",
    "tests/connector/test_vllm_events.py",
    "tests/connector/test_vllm_identity.py",
)
"""A process that is free takes the next file. The other files take seconds, so both processes end at about the same
time."""
SHARED_PAIR = ("tests/engine/test_route_pd.py", "tests/engine/test_served.py")
"""Files that share two served engines (tests/engine/shared_pair.py) go to one process, one after the other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts files by the time that they take; tests of one file keep their order."""
    places = {file: place for place, file in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Files go out in the order above; xdist would begin with those of the most tests."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class InOurOrder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return SHARED_PAIR[0] if file in SHARED_PAIR else file

    config.option.loadscopereorder = False
    return InOurOrder(config, log)
