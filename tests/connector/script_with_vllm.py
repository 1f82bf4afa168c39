"""Runs a script that has a vLLM with all its processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


def result_of(
    script: str, *arguments: str, log: Path, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """What the script beside this file printed as its result. `log` gets all that it and vLLM printed."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    with log.open("w") as errors:
        engine = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            output, _ = engine.communicate()
        finally:
            # vLLM's own processes are in its session; none may outlive the test.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
    results = [line for line in output.splitlines() if line.startswith("RESULT ")]
    assert engine.returncode == 0 and results, output[-4000:] + log.read_text()[-4000:]
    # vLLM's own lines are among the output.
    with log.open("a") as everything:
        everything.write(output)
    return json.loads(results[0].removeprefix("RESULT "))
