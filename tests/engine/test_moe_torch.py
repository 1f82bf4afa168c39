"""kvlane.moe with torch, which comes with vLLM: tensors of bfloat16, and ranks that meet by torch.distributed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import sys
import torch
import torch.distributed as dist
from kvlane.moe import AllToAll, Group, NotJoined

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(rank)
tokens = 5 + 4 * rank
x = torch.randn(tokens, 16).bfloat16()
ids = torch.randint(0, 4, (tokens, 2), dtype=torch.int32)
weights = torch.full((tokens, 2), 0.5)
with AllToAll(Group.of_torch(), experts=4, top_k=2, max_tokens=16, hidden=16) as ranks:
    got = ranks.dispatch(x, ids, weights)
    assert got.rows.dtype == torch.bfloat16 and got.counts.dtype == torch.int32
    assert len(got.rows) == int(got.counts.sum())
    # Experts that change nothing: half and half of a row is the row.
    out = ranks.combine(got.rows, got)
    assert torch.equal(out, x), (out, x)
    refused = {
        "x is on meta, and has to be in the memory of the host": x.to("meta"),
        "x requires a gradient, and none flows through kvlane": x.clone().requires_grad_(),
    }
    for why, wrong in refused.items():
        try:
            ranks.dispatch(wrong, ids, weights)
        except ValueError as error:
            assert why in str(error)
        else:
            raise AssertionError(why)
    # Not aligned, as a view of a file's bytes may be.
    unaligned = torch.frombuffer(bytearray(8 * tokens + 1), dtype=torch.float32, offset=1).reshape(tokens, 2)
    ranks.dispatch(x, ids, unaligned).give_up()
with AllToAll(Group.of_torch(), experts=4, top_k=2, max_tokens=16, hidden=16, layout="tokens") as ranks:
    found = ranks.dispatch(x, ids.numpy(), weights.numpy())
    assert all(isinstance(each, torch.Tensor) for each in (found.ids, found.weights, found.counts))
# This machine has no GPU. The other rank waited for it in all_gather.
try:
    AllToAll(Group.of_torch(), experts=4, top_k=2, max_tokens=16, hidden=16, device=("cpu", "cuda")[rank])
except (NotJoined, OSError) as error:
    assert isinstance(error, (NotJoined, OSError)[rank]), error
    assert rank or "rank 1 cannot: " in str(error), error
else:
    raise AssertionError("ranks joined without a GPU")
# Else torch's threads may outlive what they need at the end: "terminate called without an active exception".
dist.destroy_process_group()
print(len(got.rows))
"""


def test_tensors_of_two_processes_come_back_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    # Every token has two experts.
    assert sum(int(out) for out, _ in said) == 2 * (5 + 9)


def test_the_benchmark_measures_gloo_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had never run where torch is: gloo moves no numbers of 16 bits."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    sizes = [
        "--ranks",
        "2",
        "--tokens",
        "4",
        "--experts",
        "6",
        "--top-k",
        "2",
        "--hidden",
        "16",
        "--rounds",
        "2",
    ]
    command = [sys.executable, "-m", "kvlane.bench", "all-to-all", *sizes, "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    found = json.loads((tmp_path / "all-to-all.json").read_text())
    assert {"gloo-rows", "gloo-sums"} <= found["ms_by_round"].keys()
    assert [each["what"] for each in found["figures"] if each["goal"]] == [
        "dispatch / gloo",
        "combine, reduced / gloo",
    ]
