"""`kvlane bench index` with real replicas, tiny."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlane import _bench
from kvlane.bench.__main__ import main

TINY = ["--entries", "20000", "--owners", "4", "--rate", "100", "--changes", "4000", "--seconds", "1"]
TINY_RESTART = [
    "--restart-entries",
    "6000",
    "--restarts",
    "2",
    "--restart-seconds",
    "2",
    "--answer-ms",
    "500",
]


def test_a_replica_is_measured_beside_messages_and_through_restarts(tmp_path: Path) -> None:
    assert main(["index", *TINY, *TINY_RESTART, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "index.json").read_text())
    figures = {figure["what"]: figure for figure in found["figures"]}
    # Owners whose digests do not agree with the replica's need another one each. A loaded machine may lose one owner.
    assert 1 <= figures["snapshots"]["value"] < 1.5
    assert 1 <= figures["snapshots after a restart"]["value"] < 1.5
    assert found["lookups"]["lookups"] == 100 and found["lookups"]["changes_a_second"] > 0
    assert found["lookups"]["lookup_us"]["p50"] > 0 and found["lookups"]["message_us"]["p50"] > 0
    assert [each["lookups"] for each in found["restarts"]["rounds"]] == [200, 200]
    # Each of them found its prompt at its owner, or nothing: another answer ends the benchmark.
    assert all(each["given_up"] < each["lookups"] for each in found["restarts"]["rounds"])
    assert figures["core: an entry"]["value"] > 0 and figures["core: an entry"]["at_most"] == 24
    assert found["predicted"] and (tmp_path / "index.png").stat().st_size > 0


def test_owners_of_less_than_two_prompts_are_refused() -> None:
    with pytest.raises(SystemExit, match="each owner needs 1250 entries, twice --blocks, and one has 1000"):
        main(["index", "--entries", "16000"])


def test_lookups_that_cannot_be_made_are_refused() -> None:
    lookups = _bench.IndexLookups([], 1.0)
    with pytest.raises(ValueError, match="blocks of an owner"):
        lookups.ask(1, 9, 10, 100.0, 1.0)
    lookups.close()
    with pytest.raises(RuntimeError, match="closed"):
        lookups.reached()
    with pytest.raises(ValueError, match="is not IP:PORT"):
        _bench.IndexLookups([], 1.0, "nowhere")
    with pytest.raises(ValueError, match="a block that changes"):
        _bench.IndexOwners(1, 9, 0, [])
