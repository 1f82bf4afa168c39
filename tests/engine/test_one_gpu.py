"""bench/gpu/parallel.py --one-gpu with a real engine on CPUs: each rank is a host of its own to vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from served import ANSWER_SECONDS, ENVIRONMENT, START_SECONDS

from kvlane.bench.processes import free_port

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu" / "parallel.py"
SMALL = ["--shape", "tiny", "--eager", "--prompts", "2", "--tokens", "600", "--cache-bytes", "500000000"]
SMALL += ["--kv-cache-bytes", "300000000"]


def test_two_ranks_that_vllm_takes_for_two_hosts_share_one_daemon(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, *SMALL, "--tensor-parallel", "2", "--one-gpu", "--only-several"]
    ran = subprocess.run(
        [*command, "--http", f"127.0.0.1:{free_port()}", "--commit", "none", "--out", tmp_path],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=START_SECONDS + ANSWER_SECONDS,
        check=False,
    )
    assert (tmp_path / "parallel.json").exists(), ran.stdout + ran.stderr
    several = json.loads((tmp_path / "parallel.json").read_text())["found"]["2"]
    # The tiny model's answers depend too little on one block, so that control does not hold.
    facts = ("same_tokens", "control_same_again", "control_bytes", "control_distinct", "control_loaded")
    assert {name: several[name] for name in facts} == dict.fromkeys(facts, True)
    assert several["loaded_tokens"] == [512, 512]
    # The model has one KV head, so both ranks hold the same blocks.
    assert several["blocks_unlike_rank_0"] == [0]
