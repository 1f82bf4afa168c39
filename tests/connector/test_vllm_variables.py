"""The variables of vLLM that our pages and scripts set: vLLM ignores a name that it does not know."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from vllm import envs

ROOT = Path(__file__).resolve().parents[2]
WHERE = ("README.md", "Makefile", "bench", "crates", "docs", "examples", "python", "tests")


def test_every_variable_of_vllm_that_we_name_exists() -> None:
    """Four benchmarks set VLLM_WORKER_MULTIPROCESSING_METHOD, which no vLLM reads, so their workers were forked."""
    listed = subprocess.run(
        ["git", "ls-files", *WHERE], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    named: dict[str, str] = {}
    for file in listed:
        if file.endswith((".py", ".md", ".rs", ".sh", ".service", ".toml", ".yaml", "Makefile")):
            # This file names one that does not exist.
            text = (ROOT / file).read_text() if file != str(Path(__file__).relative_to(ROOT)) else ""
            named |= dict.fromkeys(re.findall(r"\bVLLM_[A-Z0-9_]+\b", text), file)
    assert len(named) > 10
    assert {name: file for name, file in named.items() if name not in envs.environment_variables} == {}
