"""The ranks of one engine on one GPU, for what needs no second one: bytes and answers, never times.

vLLM and NCCL refuse two ranks of a host on the same GPU. So each rank gets a host of its own: vLLM by `nnodes`, NCCL by
`NCCL_HOSTID`. NCCL moves sums through sockets then, and the GPU runs the ranks' kernels by turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import measure

# Ranks that never meet fail after this time.
MEETING_S = 240
ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    # Sums in memory that the ranks share need a GPU for each of them.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


@contextmanager
def other_ranks(settings: argparse.Namespace, ranks: int) -> Iterator[argparse.Namespace]:
    """Starts all ranks but the first. Yields the settings with which `measure.start` starts that one and the engine."""
    os.environ.update(ENVIRONMENT)
    # vLLM draws a name of the engine on each host; they have to be equal.
    connector = json.dumps(json.loads(settings.connector) | {"engine_id": f"kvlane-{os.getpid()}"})
    shared = vars(settings) | {
        "connector": connector,
        "hosts": ranks,
        "meeting_port": _free_port(),
        "meeting_s": MEETING_S,
    }
    first, *others = [argparse.Namespace(**shared, host=host) for host in range(ranks)]
    context = multiprocessing.get_context("spawn")
    processes = []
    try:
        for its in others:
            os.environ["NCCL_HOSTID"] = f"kvlane-{its.host}"
            processes.append(context.Process(target=_serve, args=(its,)))
            processes[-1].start()
        os.environ["NCCL_HOSTID"] = f"kvlane-{first.host}"
        yield first
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _serve(settings: argparse.Namespace) -> None:
    """What `vllm serve --headless` does: the ranks of this host, until the process is terminated."""
    from vllm.entrypoints.cli.serve import run_headless

    arguments = vars(measure.engine_arguments(settings))
    run_headless(argparse.Namespace(**arguments, headless=True, api_server_count=0))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
