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


def two_hosts(model: Path, folder: Path, *flags: str) -> dict[str, Any]:
    try:
        refused = subprocess.run([*NAMESPACES, "ip", "link", "show"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs unshare, of util-linux")
    if refused.returncode:
        pytest.skip(f"needs network namespaces and ip, of iproute2: {refused.stderr.strip()}")
    folder.chmod(0o700)
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder)}
    command = [*NAMESPACES, sys.executable, str(SCRIPT), str(model), str(folder), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("flags", [(), ("--tls",)], ids=["tcp", "tls"])
def test_a_prompt_lands_from_host_to_host(model: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    found = two_hosts(model, tmp_path, *flags)
    assert found["address"].startswith("10.79.0.2:")
    friend = found["friend"]
    assert (friend["right"], friend["cached"], friend["errors"]) == (True, ALL, 0)
    assert friend["counted"]["direct_landed"] == 1 and friend["counted"]["direct_tcp_bytes"] > 0
    assert friend["counted"].get("direct_cma_bytes", 0) == 0
    # The controls: without the token and without the wire nothing lands, and answers stay right.
    assert (found["stranger"]["right"], found["stranger"]["cached"]) == (True, 0)
    assert (found["cut"]["right"], found["cut"]["cached"]) == (True, 0)
