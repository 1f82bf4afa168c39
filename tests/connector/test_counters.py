import pytest

from kvlane.connector.counters import COUNTERS, Counters
from kvlane.connector.scheduler import CORE_COUNTS as SCHEDULER_COUNTS
from kvlane.connector.worker import CORE_COUNTS as WORKER_COUNTS


def test_counts_are_taken_once() -> None:
    counters = Counters()
    assert counters.take() is None
    counters.add("hit_tokens", 32)
    counters.add("hit_tokens", 16)
    counters.add("failed_saves", 0)
    assert counters.take() == {"hit_tokens": 48}
    assert counters.take() is None


def test_an_unknown_counter_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="'hits_tokens'"):
        Counters().add("hits_tokens")


def test_the_cores_counts_are_taken_over_by_our_names() -> None:
    assert set(COUNTERS) >= SCHEDULER_COUNTS | WORKER_COUNTS
    counters = Counters()
    counters.add_core({"losses": 2, "lookups": 3, "of no interest": 5}, SCHEDULER_COUNTS)
    assert counters.take() == {"disconnects": 2, "lookups": 3}
