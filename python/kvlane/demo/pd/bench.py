"""Measures the demo's router with clients, called as users call them: `kvlane bench serve` and vLLM's own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from kvlane.bench.processes import beside_python
from kvlane.demo.pd.asking import MODEL_NAME
from kvlane.demo.scenarios import Scenario

PROMPTS = 12
ANSWER_TOKENS = 16
_TIMEOUT_S = 600


def kvlanes(scenario: Scenario, router_url: str, prompt_tokens: int, out: Path) -> None:
    """Runs `kvlane bench serve`: its figures go into the scenario, and its output into a log beside them."""
    folder = out / "demo-pd-bench"
    # The router has no counters of caches, so a second round could not be told from a repeat.
    command = [beside_python("kvlane"), "bench", "serve", "--base-url", router_url, "--model", MODEL_NAME]
    command += ["--connector", "none", "--warm-rounds", "0", "--num-prompts", str(PROMPTS)]
    command += ["--input-len", str(prompt_tokens), "--output-len", str(ANSWER_TOKENS), "--out", str(folder)]
    if _runs(scenario, "kvlane bench serve", command, folder):
        [measured] = json.loads((folder / "serve.json").read_text())["runs"]
        [round_] = measured["rounds"]
        kept = ("requests", "failed", "requests_per_s", "ttft_ms", "ttft_each_ms", "tpot_ms", "e2el_ms")
        scenario.figures |= {name: round_[name] for name in kept}
        scenario.must(round_["requests"] == PROMPTS, f"{round_['requests']} requests instead of {PROMPTS}")


def vllms(scenario: Scenario, router_url: str, prompt_tokens: int, tokenizer: str, out: Path) -> None:
    """Runs `vllm bench serve`, with its figures and output in the same places."""
    folder = out / "demo-pd-vllm-bench"
    command = [beside_python("vllm"), "bench", "serve", "--base-url", router_url]
    command += ["--model", MODEL_NAME, "--tokenizer", tokenizer, "--dataset-name", "random"]
    command += ["--random-input-len", str(prompt_tokens), "--random-output-len", str(ANSWER_TOKENS)]
    command += ["--num-prompts", str(PROMPTS), "--request-rate", "2", "--seed", "1", "--ignore-eos"]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", "bench.json"]
    if _runs(scenario, "vllm bench serve", command, folder):
        said: dict[str, Any] = json.loads((folder / "bench.json").read_text())
        kept = ("completed", "failed", "request_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")
        scenario.figures |= {name: said[name] for name in kept if name in said}
        scenario.must(said["completed"] == PROMPTS, f"{said['completed']} requests instead of {PROMPTS}")


def _runs(scenario: Scenario, name: str, command: list[str], folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "bench.log"
    with log.open("wb") as sink:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            scenario.must(False, f"{name} took more than {_TIMEOUT_S} s; see {log}")
            return False
    scenario.must(done.returncode == 0, f"{name} ended with status {done.returncode}; see {log}")
    return done.returncode == 0
