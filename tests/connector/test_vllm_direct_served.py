"""Direct hand-offs between two vLLMs with all their processes, each of two ranks: each rank reads its own part."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_with_vllm import result_of

# Six processes that import vLLM, and one for both clients: minutes on a busy machine.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.soak]


@pytest.mark.parametrize("parallel", ["--tensor", "--pipeline"])
def test_prompts_land_in_an_engine_of_two_ranks(
    parallel: str, model: Path, runtime_folder: None, tmp_path: Path
) -> None:
    log = tmp_path / "engines.log"
    arguments = ("--model", str(model), "--folder", str(tmp_path), parallel, "2")
    result = result_of("served_direct.py", *arguments, log=log)
    assert result["landed"] == [[alone, 299] for alone in result["alone"]]
    assert len({tuple(alone) for alone in result["alone"]}) == 3
    assert result["counted"] == {"direct_landed": 3, "direct_landed_tokens": 900, "direct_fallbacks": 0}
    assert result["resets"] == [True, True]
