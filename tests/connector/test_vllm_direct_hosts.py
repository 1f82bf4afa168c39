"""Prompts go from a prefill engine to a decode engine on another host: network namespaces stand for the hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("two_hosts.py")
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--"]
SECONDS = 400
ALL = 469
"""vLLM computes one token of each prompt."""


def two_hosts(model: Path, folder: Path) -> dict[str, Any]:
    try:
        refused = subprocess.run([*NAMESPACES, "ip", "link", "show"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs unshare, of util-linux")
    if refused.returncode:
        pytest.skip(f"needs network namespaces and ip, of iproute2: {refused.stderr.strip()}")
    folder.chmod(0o700)
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder)}
    command = [*NAMESPACES, sys.executable, str(SCRIPT), str(model), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_prompt_lands_from_host_to_host_by_tcp_and_by_tls(model: Path, tmp_path: Path) -> None:
    found = two_hosts(model, tmp_path)
    for way in ("tcp", "tls"):
        assert found[way]["address"].startswith("10.79.0.2:")
        friend = found[way]["friend"]
        assert (friend["right"], friend["cached"], friend["errors"]) == (True, ALL, 0), way
        assert friend["counted"]["direct_landed"] == 1 and friend["counted"]["direct_tcp_bytes"] > 0
        assert friend["counted"].get("direct_cma_bytes", 0) == 0
    # The controls: without the token and without the wire nothing lands, and answers stay right.
    assert (found["tcp"]["stranger"]["right"], found["tcp"]["stranger"]["cached"]) == (True, 0)
    assert (found["tcp"]["cut"]["right"], found["tcp"]["cut"]["cached"]) == (True, 0)
