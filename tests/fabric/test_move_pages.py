"""examples/move_pages.py, as a newcomer runs it: between the host's memory, and between fake GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "move_pages.py"
# As much of torch as the example needs.
TORCH = """
import numpy
from kvlane.bench.memory import GpuMemory

uint8 = numpy.uint8

class frombuffer:
    def __init__(self, content, dtype):
        self.content = numpy.frombuffer(content, dtype)

    def to(self, device):
        return Tensor(self.content, device)

class Tensor:
    def __init__(self, content, device):
        self.device, self.nbytes = device, len(content)
        try:
            self.memory = GpuMemory(self.nbytes, device)
        except OSError as error:
            raise RuntimeError(str(error))
        self.memory.put(0, content)

    def data_ptr(self):
        return self.memory.address

    def is_contiguous(self):
        return True

    def __getitem__(self, at):
        return self.memory.get(at, at + 1)[0]
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "torch.py").write_text(TORCH)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "KVLANE_GPU_DRIVER": "fake", "PYTHONPATH": path}
    command = [sys.executable, str(EXAMPLE), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def check(done: subprocess.CompletedProcess[str], carriers: str) -> None:
    assert done.returncode == 0, done.stderr
    sent, received = done.stdout.splitlines()
    assert re.fullmatch(f"sent 8 pages of 65536 bytes by ({carriers})", sent)
    assert received == "received pages that begin with [3, 14, 15, 92, 65, 35, 89, 79]"


def test_pages_go_between_processes_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    # Not everywhere may a process read another's memory.
    check(run(tmp_path), "cma|tcp")


@pytest.mark.fake_gpus
def test_pages_go_from_one_gpus_memory_to_anothers(tmp_path: Path) -> None:
    check(run(tmp_path, "--memory", "cuda:0", "cuda:1"), "cuda")
    check(run(tmp_path, "--memory", "host", "cuda:1"), "tcp-slots")


@pytest.mark.fake_gpus
def test_a_gpu_that_is_not_there_is_said_by_either_side(tmp_path: Path) -> None:
    for memory in (["cuda:9", "host"], ["host", "cuda:9"]):
        done = run(tmp_path, "--memory", *memory)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "torch has no memory on cuda:9: there is no GPU 9\n"
