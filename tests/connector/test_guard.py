import logging

import pytest

from kvlane.connector.guard import Failures, guarded


class Side:
    def __init__(self) -> None:
        self.failures = Failures()

    @guarded(lambda: (0, False), "the request is computed")
    def matched(self, value: int) -> tuple[int, bool]:
        return 10 // value, True


def test_an_error_becomes_the_default_is_logged_once_and_always_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = Side()
    assert side.matched(5) == (2, True)
    with caplog.at_level(logging.ERROR, logger="vllm.kvlane"):
        assert [side.matched(0) for _ in range(3)] == [(0, False)] * 3
    (line,) = caplog.messages
    assert "matched failed, the request is computed" in line
    assert "ZeroDivisionError" in line
    assert side.failures.take() == 3
    assert side.failures.take() == 0


def test_another_kind_of_error_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    side = Side()
    with caplog.at_level(logging.ERROR, logger="vllm.kvlane"):
        side.matched(0)
        side.matched("x")  # pyright: ignore
    assert len(caplog.messages) == 2
