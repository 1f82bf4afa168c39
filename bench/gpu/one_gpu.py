"""The ranks of one engine on one GPU, for what needs no second one: bytes and answers, never times.

vLLM and NCCL refuse two ranks of a host on the same GPU. So each rank gets a host of its own: vLLM by `nnodes`, NCCL by
`NCCL_HOSTID`. NCCL moves sums through sockets then. CUDA's MPS lets kernels of several processes run at the same time:
a sum of 16 KiB took 0.12 ms on an H200, and 4.5 ms where the ranks' kernels took turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import measure

from kvlane.bench import report
from kvlane.bench.processes import free_port

# Ranks that never meet fail after this time.
MEETING_S = 240
# A rank that has not ended by itself after this time is killed.
ENDING_S = 10.0
ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    # Sums in memory that the ranks share need a GPU for each of them.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


@contextmanager
def side_by_side(folder: Path) -> Iterator[None]:
    """Kernels of this process's children run at the same time on a GPU. On CPUs there is nothing to do."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield
        return
    for name in ("PIPE", "LOG"):
        os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = str(folder / name.lower())
        (folder / name.lower()).mkdir()
    subprocess.run([control, "-d"], check=True)
    try:
        yield
    finally:
        # Its server ends once no process uses the GPU through it, or after these seconds.
        try:
            subprocess.run([control], input=b"quit -t 5\n", timeout=ENDING_S, check=False)
        except subprocess.TimeoutExpired:
            report.say("    CUDA's MPS has not ended")


@contextmanager
def other_ranks(settings: argparse.Namespace, ranks: int) -> Iterator[argparse.Namespace]:
    """Starts all ranks but the first. Yields the settings with which `measure.start` starts that one and the engine."""
    os.environ.update(ENVIRONMENT)
    # vLLM draws the engine's name on each host, and kvlane needs the same one on all.
    engine_id = {"engine_id": f"kvlane-{os.getpid()}"}
    connector = settings.connector and json.dumps(json.loads(settings.connector) | engine_id)
    shared = vars(settings) | {
        "connector": connector,
        "hosts": ranks,
        "meeting_port": free_port(),
        "meeting_s": MEETING_S,
        # vLLM's default depends on how a process is started, and ranks that differ wait for each other forever.
        "most_running": 64,
    }
    first, *others = [argparse.Namespace(**shared, host=host) for host in range(ranks)]
    context = multiprocessing.get_context("spawn")
    processes = []
    try:
        for its in others:
            os.environ.update(_of_host(its))
            processes.append(context.Process(target=_serve, args=(its,)))
            processes[-1].start()
        os.environ.update(_of_host(first))
        yield first
    finally:
        for process in processes:
            process.terminate()
            process.join(ENDING_S)
            # A rank that is still there waits for one that is gone.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _of_host(settings: argparse.Namespace) -> dict[str, str]:
    """Each host has a name of its own for NCCL, and its own folders for compiled code."""
    folders = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    own = {name: str(Path(settings.scratch) / f"{name.lower()}-{settings.host}") for name in folders}
    return {"NCCL_HOSTID": f"kvlane-{settings.host}"} | own


def _serve(settings: argparse.Namespace) -> None:
    """What `vllm serve --headless` does: the ranks of this host, until the process is terminated."""
    os.setsid()
    from vllm.entrypoints.cli.serve import run_headless

    arguments = vars(measure.engine_arguments(settings))
    run_headless(argparse.Namespace(**arguments, headless=True, api_server_count=0))
