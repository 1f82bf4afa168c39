"""Another engine's blocks become prefix cache of a vLLM with all its processes, one or two of its batches in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from script_with_vllm import result_of

# Three processes that import vLLM take a minute or more on a busy machine; as many minutes with two workers.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.gate]


@pytest.mark.parametrize(
    ("arguments", "batches"),
    [
        pytest.param([], 1, id="one batch", marks=pytest.mark.old_vllm_soak),
        # The CPU worker of 0.24 has no stand-in for what it does with streams.
        pytest.param(["--overlap"], 2, id="asynchronous scheduling"),
        pytest.param(["--pipeline", "2"], 2, id="two pipeline stages", marks=pytest.mark.old_vllm_soak),
    ],
)
def test_blocks_land_in_a_served_engine(
    arguments: list[str], batches: int, model: Path, tmp_path: Path
) -> None:
    """The connector lives in the engine's process, and the bytes are written by workers, each its own part."""
    folder = tmp_path / "peer"
    folder.mkdir()
    log = tmp_path / "engine.log"
    result = result_of(
        "served_landing.py", "--model", str(model), "--folder", str(folder), *arguments, log=log
    )
    assert result["batches"] == batches, "how many steps are under way at a time"
    assert result["blocks"] == 10
    alone = result["alone"]["tokens"]
    assert result["alone"]["cached"] == 0

    # All but one token, while others run; with a byte that differs other tokens.
    assert landed(result["landed"]) == (alone, 299)
    wrong, cached = landed(result["flipped"])
    assert wrong != alone and cached == 299
    # A reset and a pause that clears caches end the landing, and succeed although blocks are held.
    for how in ("reset", "paused"):
        assert result[how]["amid"] is True
        assert landed(result[how]) == (alone, 0)
    assert [count for count in result["given_back"] if count] == [5, 5]
    # The blocks that came for a request whose client gave up. No block is held at the end.
    assert result["aborted"] == {"tokens": alone, "cached": 160}
    assert result["given_back"][-1] == 0


def landed(result: dict[str, Any]) -> tuple[list[int], int]:
    assert result["waited"], "half of its blocks were enough for it"
    assert result["others_are_right"]
    return result["tokens"], result["cached"]
