"""docs/start.md, word for word: the daemon, a real engine, a chat that is computed and one that is loaded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from busy import stretched
from served import ReservedPort

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from pages import ROOT, SHELL, blocks

# tests/packaging does it with the wheel; here the package under test is installed.
INSTALL = "pip install dist/kvlane-*.whl\n"
ROLE = '"kv_role": "kv_both"'
LOOKUPS = json.dumps({"kvlane.lookup_timeout_ms": 1e3 * stretched(0.25)})
SECONDS = 500
# The words of the question, and what the chat template puts around them.
PROMPT_TOKENS = 2000 + 3


@pytest.fixture
def runtime_folder() -> Iterator[Path]:
    """Short, since the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvlane-") as path:
        yield Path(path)


def test_the_start_page_word_for_word(tmp_path: Path, runtime_folder: Path) -> None:
    """Only the ports are others, since somebody may have those of the page, and a lookup has more time on a busy
    machine: one that is out of time is a miss."""
    text = "".join(block.text for block in blocks(ROOT / "docs/start.md") if block.language in SHELL)
    assert text.count(INSTALL) == 1
    with closing(ReservedPort()) as port:
        engine = port.number
        script = text.replace(INSTALL, "").replace("127.0.0.1:8000", f"127.0.0.1:{engine}")
        script = script.replace(" vllm serve out/tiny-model ", f" vllm serve out/tiny-model --port {engine} ")
        assert script.count(str(engine)) == 5, "every place that names the engine's port"
        assert script.count(ROLE) == 1
        script = script.replace(ROLE, f'{ROLE}, "kv_connector_extra_config": {LOOKUPS}')
        told = run(script, tmp_path, runtime_folder)

    asked = re.findall(r"^(cold|warm): [\d.]+ s, (\d+) tokens asked$", told, re.M)
    assert asked == [("cold", str(PROMPT_TOKENS)), ("warm", str(PROMPT_TOKENS))]
    cold, warm = re.findall(r"^answer: (.+)$", told, re.M)
    assert cold == warm and len(cold.split()) >= 8
    (hit,) = re.findall(r"^vllm:kvlane_hit_tokens_total\{.*\} (\S+)$", told, re.M)
    # The last block is computed again: of it vLLM wants the first token.
    assert 0.9 * PROMPT_TOKENS < float(hit) < PROMPT_TOKENS
    pages = told.split("\nblocks")[1:]
    assert len(pages) == 5, "kvlane status five times"
    counts = [int(page.split()[0].strip(",")) for page in pages]
    assert counts[0] == counts[1] == 0 < counts[2] <= counts[3] == counts[4]
    for page, has_engine in zip(pages, (False, True, True, True, False), strict=True):
        assert ("scheduler" in page and "worker" in page) == has_engine, page


def run(script: str, folder: Path, runtime_folder: Path) -> str:
    """What it wrote. All that it started has ended."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVLANE_")}
    environment |= {
        "XDG_RUNTIME_DIR": str(runtime_folder),
        "KVLANE_HTTP": "off",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = process.communicate(timeout=SECONDS)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    logs = "".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("out/*.log")))
    print(told, logs)
    assert process.returncode is not None
    return told
