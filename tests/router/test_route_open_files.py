"""A router warns about the limit of open files if that is too low for what it is asked for, or for a usual host."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import routed
from routed import COMPLETIONS, ask, wanted

Limit = Callable[[int], None]


@pytest.fixture
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Starts routers with this limit of open files."""
    kvlane = routed.KVLANE

    def limit_files(files: int) -> None:
        program = tmp_path / f"kvlane-{files}"
        program.write_text(f'#!/bin/sh\nulimit -n {files}\nexec "{kvlane}" "$@"\n')
        program.chmod(0o755)
        monkeypatch.setattr(routed, "KVLANE", program)

    return limit_files


def warnings(*flags: str) -> list[str]:
    with routed.Router("--worker", "http://127.0.0.1:9", *flags, nodes=0) as router:
        return [line for line in router.lines if "raise that limit" in line]


def test_a_limit_that_is_enough_for_a_usual_host_is_no_warning(limit: Limit) -> None:
    """On a laptop that allows 4,096 files each router began with a warning, although no flag asked for more."""
    limit(4096)
    assert warnings() == []
    (warning,) = warnings("--max-connections", "10000")
    assert "--max-connections 10000: this process may open 4096 files" in warning
    assert "enough for about 1332 clients" in warning


def test_a_small_limit_is_a_warning_even_if_nobody_asked(limit: Limit) -> None:
    limit(1024)
    (warning,) = warnings()
    assert "this process may open 1024 files, which is enough for about 308 clients" in warning


def test_clients_for_whom_no_files_are_left_wait(limit: Limit) -> None:
    """The router took them, and had no descriptor left to reach an engine: it answered them with errors."""
    limit(160)
    with routed.routed(["--itl-ms", "20"]) as (router, _), ThreadPoolExecutor(100) as clients:
        body = wanted("a prompt", max_tokens=50)
        answers = list(clients.map(lambda _: ask(router.address, COMPLETIONS, body)[0], range(100)))
    assert set(answers) == {200}
