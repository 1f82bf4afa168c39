"""Direct hand-offs between two vLLMs with all their processes, each of two ranks: each rank reads its own part."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_with_vllm import result_of

# Six processes that import vLLM, and one for both clients: minutes on a busy machine.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.soak]


@pytest.mark.parametrize(
    ("how", "cached", "landed"),
    [
        (("--tensor", "2"), 299, 300),
        (("--pipeline", "2"), 299, 300),
        # Whole blocks of 32 tokens.
        (("--pipeline", "2", "--drafter"), 288, 288),
    ],
)
def test_prompts_land_in_an_engine_of_two_ranks(
    how: tuple[str, ...], cached: int, landed: int, model: Path, runtime_folder: None, tmp_path: Path
) -> None:
    log = tmp_path / "engines.log"
    result = result_of("served_direct.py", "--model", str(model), "--folder", str(tmp_path), *how, log=log)
    assert result["landed"] == [[alone, cached] for alone in result["alone"]]
    assert len({tuple(alone) for alone in result["alone"]}) == 3
    counted = {"direct_landed": 3, "direct_landed_tokens": 3 * landed, "direct_fallbacks": 0}
    assert result["counted"] == counted
    assert result["resets"] == [True, True]
