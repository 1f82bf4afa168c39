"""Plans which process listens where, and checks the machine's ports and memory. Starts nothing."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvlane.bench.processes import free_port

BLOCK_TOKENS = 32
ROUTER_PORT, ADMIN_PORT = 8000, 9092
# The three processes of one engine, without weights, KV cache and the pool that it maps (measured: docs/routing.md).
ENGINE_BYTES = 2_100 << 20
# Router, daemon without its pool, and the demo itself.
OTHER_BYTES = 500 << 20


class NotPossible(Exception):
    """This machine cannot run it; the sentence says what to do."""


@dataclass(frozen=True)
class Node:
    """One engine of the plan."""

    name: str
    """Its short name: P1, P2, D1 ..."""
    role: str
    """Its role: prefill, decode or worker."""
    port: int
    gpu: str | None = None
    """The GPU that computes for it, as CUDA_VISIBLE_DEVICES names it; None: the CPU."""

    @property
    def url(self) -> str:
        """The address at which it answers."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Plan:
    """All processes that are started."""

    prefill: list[Node]
    decode: list[Node]
    workers: list[Node]
    """Engines whose role the router changes between prefill and decode, as the work needs it."""
    joins: Node
    """A prefill engine that starts later, and is added to the router then."""
    router_port: int
    admin_port: int
    notes: list[str]
    """Sentences about differences from the expected plan, such as another port."""

    @property
    def engines(self) -> list[Node]:
        """The engines that run from the beginning."""
        return [*self.prefill, *self.decode, *self.workers]

    def share_of_gpu(self, node: Node) -> float:
        """The share of its GPU's memory that an engine may take; the engine that joins later has room too."""
        everyone = [*self.engines, self.joins]
        return 0.9 / max(1, sum(each.gpu == node.gpu for each in everyone))

    @property
    def router_url(self) -> str:
        """The router's address for clients."""
        return f"http://127.0.0.1:{self.router_port}"

    @property
    def admin_url(self) -> str:
        """The router's address for operators."""
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def threads(self) -> int:
        """Compute threads of each engine."""
        return max(1, len(os.sched_getaffinity(0)) // len(self.engines))

    def name_of(self, url: str | None) -> str:
        """An engine's short name."""
        return next((node.name for node in [*self.engines, self.joins] if node.url == url), url or "-")


def plan(
    prefill: int,
    decode: int,
    prefill_port: int,
    decode_port: int,
    workers: int = 0,
    gpus: Sequence[str] = (),
) -> Plan:
    """Chooses the ports. Workers' ports follow those of decode engines. The engines are spread over `gpus` in turn, so
    that prefill and decode engines have different ones if there are two. Raises NotPossible if the ports of engines
    are taken; router and admin port move to free ones."""
    if prefill < 1 or decode < 1:
        raise NotPossible(f"--prefill {prefill} and --decode {decode}: there must be at least one of each")
    ports = {prefill_port + at for at in range(prefill + 1)} & {
        decode_port + at for at in range(decode + workers)
    }
    if ports:
        raise NotPossible(f"port {min(ports)} is meant for two engines: choose another --decode-port")
    notes: list[str] = []
    nodes = [
        *(Node(f"P{at + 1}", "prefill", prefill_port + at) for at in range(prefill + 1)),
        *(Node(f"D{at + 1}", "decode", decode_port + at) for at in range(decode)),
        *(Node(f"W{at + 1}", "worker", decode_port + decode + at) for at in range(workers)),
    ]
    if gpus:
        # The engine that joins later comes last.
        order = [*nodes[:prefill], *nodes[prefill + 1 :], nodes[prefill]]
        placed = {node.name: replace(node, gpu=gpus[at % len(gpus)]) for at, node in enumerate(order)}
        nodes = [placed[node.name] for node in nodes]
    for node in nodes:
        if not _is_free(node.port):
            flag = "--prefill-port" if node.role == "prefill" else "--decode-port"
            raise NotPossible(
                f"port {node.port} is taken, and {node.name} was to listen there: end what listens there "
                f"(ss -ltnp 'sport = :{node.port}' shows it), or choose other ports with {flag}"
            )
    router = _this_or_free(ROUTER_PORT, "clients are served", notes)
    admin = _this_or_free(ADMIN_PORT, "the router's admin pages are", notes)
    others = nodes[prefill + 1 :]
    return Plan(nodes[:prefill], others[:decode], others[decode:], nodes[prefill], router, admin, notes)


def _this_or_free(port: int, what: str, notes: list[str]) -> int:
    if _is_free(port):
        return port
    other = free_port()
    notes.append(f"port {port} is taken: {what} at port {other}")
    return other


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Servers set this too: a port whose last connections still linger is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def check_memory(engines: int, weights: int, kv_cache: int, pool: int, available: int) -> int:
    """Roughly the bytes that all of it takes. Raises NotPossible if `available` is less."""
    each = ENGINE_BYTES + weights + kv_cache
    needed = engines * each + pool + OTHER_BYTES
    if needed > available:
        fits = max(0, available - pool - OTHER_BYTES) // each
        advice = (
            f"fewer engines fit ({fits} of them)"
            if fits >= 2
            else "end other programs, or take a smaller --model"
        )
        raise NotPossible(
            f"{engines} engines take about {_gib(needed)} GiB, and {_gib(available)} GiB of memory are available: "
            + advice
        )
    return needed


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that new processes may take: of the machine, or of the container where that is less."""
    available = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = (root / "sys/fs/cgroup/memory.max").read_text().strip()
        used = int((root / "sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def weight_bytes(model: Path) -> int:
    """Bytes of a model's weights as float32, in which the engines compute; 0 if it is still to be downloaded."""
    if not model.is_dir():
        return 0
    files = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    try:
        is_half = '"float32"' not in (model / "config.json").read_text()
    except OSError:
        is_half = True
    return files * (2 if is_half else 1)


def _gib(count: int) -> str:
    return f"{math.ceil(count / (1 << 30) * 10) / 10:.1f}"
