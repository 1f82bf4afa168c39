"""vLLM serves a mixture of experts, and kvlane brings its tokens to their experts and back.

python examples/serve_moe.py MODEL                               two GPUs, a half of the experts on each
python examples/serve_moe.py MODEL --ranks 4 --engine-args "--max-model-len 8192"    four, and a flag of vLLM's

The engine has a data-parallel rank for each GPU, and vLLM's backend for DeepEP's low-latency calls. KVLANE_DEEP_EP=1
gives vLLM kvlane's module instead of DeepEP's. This program asks the engine one question, shows what kvlane logged, and
ends it. GPUs have to reach each other: `kvlane doctor` shows that. On CPUs vLLM calls no such backend.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from kvlane.bench.processes import beside_python, free_port, wait_for_health

SAID = "kvlane: all-to-all for DeepEP's"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a name at Hugging Face, or a folder")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs (default %(default)s)")
    parser.add_argument("--prompt", default="A mixture of experts is")
    parser.add_argument("--log", type=Path, default=Path("out/serve-moe.log"), help="(default %(default)s)")
    parser.add_argument("--engine-args", default="", help="further flags of vllm serve, in one string")
    settings = parser.parse_args()
    port = free_port()
    command = [
        beside_python("vllm"),
        "serve",
        settings.model,
        "--port",
        str(port),
        "--served-model-name",
        "moe",
    ]
    command += ["--data-parallel-size", str(settings.ranks), "--enable-expert-parallel"]
    # Most tokens of a rank in a step: memory for all of them is taken at once.
    command += [
        "--all2all-backend",
        "deepep_low_latency",
        "--max-num-batched-tokens",
        "256",
        *shlex.split(settings.engine_args),
    ]
    print(f"starts {' '.join(command)}; its log is {settings.log}", flush=True)
    settings.log.parent.mkdir(parents=True, exist_ok=True)
    with settings.log.open("wb") as log:
        engine = subprocess.Popen(
            command,
            env=os.environ | {"KVLANE_DEEP_EP": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            # All its processes end with it.
            start_new_session=True,
        )
        try:
            wait_for_health(f"http://127.0.0.1:{port}", engine, settings.log)
            print(settings.prompt + answer(port, settings.prompt))
        finally:
            os.killpg(engine.pid, signal.SIGTERM)
            engine.wait()
    said = [line for line in settings.log.read_text(errors="replace").splitlines() if SAID in line]
    if not said:
        sys.exit(f"vLLM did not use kvlane's all-to-all: {settings.log} says why")
    print(said[0][said[0].index(SAID) :])


def answer(port: int, prompt: str) -> str:
    asked = json.dumps({"model": "moe", "prompt": prompt, "max_tokens": 32, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", asked, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)["choices"][0]["text"]


if __name__ == "__main__":
    main()
