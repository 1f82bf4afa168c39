"""Direct hand-offs from host to host: two real engines in network namespaces of their own, over TCP and TLS."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from script_with_vllm import result_of

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))

PRIVATE = ("unshare", "--user", "--map-root-user", "--net")
# All but the last token, which vLLM computes.
HIT = 299


def refusal() -> str | None:
    """Why this machine has no namespaces for this test, if it has none."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    made = subprocess.run(
        [*PRIVATE, "ip", "link", "add", "near", "type", "veth", "peer", "name", "far"],
        capture_output=True,
        text=True,
        check=False,
    )
    return made.stderr.strip() if made.returncode else None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["tcp", pytest.param("tls", marks=pytest.mark.soak)])
def test_a_prompt_goes_from_host_to_host_with_a_token_and_not_without(
    way: str, model: Path, tmp_path: Path
) -> None:
    if why := refusal():
        pytest.skip(f"the kernel has no namespaces for this process: {why}")
    arguments = ["--model", str(model), "--folder", str(tmp_path)]
    if way == "tls":
        make_certificates(tmp_path)
        arguments.append("--tls")
    result = result_of("two_hosts.py", *arguments, log=tmp_path / "engines.log", before=PRIVATE)
    with_it, without = result["both"], result["another"]
    assert with_it["is_as_alone"] and with_it["cached"] == HIT
    assert (with_it["landed"], with_it["fallbacks"], with_it["cma_bytes"]) == (1, 0, 0)
    assert with_it["tcp_bytes"] > 0
    # The control: an engine with another token computes the prompt itself.
    assert without["is_as_alone"] and without["cached"] == 0
    assert (without["landed"], without["fallbacks"], without["tcp_bytes"]) == (0, 1, 0)


def make_certificates(folder: Path) -> None:
    """As docs/fabric.md says."""
    from pages import ROOT, blocks

    (block,) = (block for block in blocks(ROOT / "docs/fabric.md") if "openssl" in block.text)
    subprocess.run(["bash", "-eu", "-c", block.text], cwd=folder, capture_output=True, check=True)
