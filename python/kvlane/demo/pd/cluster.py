"""Starts daemon, engines and router with progress shown, and ends them all in the end."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from kvlane._core import Tool
from kvlane.bench.processes import connector_config, free_port
from kvlane.demo.pd.plan import Node, Plan
from kvlane.demo.pd.processes import Router, ServedEngine, end_all, wait_until
from kvlane.demo.processes import Daemon

CHUNK_TOKENS = 256
"""Engines on the CPU that hand over directly compute a prompt in steps of so many tokens: what one step has computed
moves during the next."""


class Cluster:
    """Everything of a plan. As a context it ends all processes at its end."""

    def __init__(
        self,
        plan: Plan,
        model: str,
        logs: Path,
        max_tokens: int,
        kv_cache: int,
        pool_size: str,
        route_settings: str = "",
        is_direct: bool = False,
        dtype: str = "float32",
    ) -> None:
        """`route_settings`: further ones of the router, as TOML. `is_direct`: there is no daemon, and engines hand over
        to each other."""
        self.plan = plan
        self.is_direct = is_direct
        self.kv_cache = kv_cache
        """Bytes of each engine's KV cache."""
        self.engines: dict[str, ServedEngine] = {}
        self.memory: dict[str, int] = {}
        """Bytes of each engine when all were ready."""
        self.model = model
        """The model's name or folder."""
        self._logs = logs
        self._max_tokens, self._pool_size, self._dtype = max_tokens, pool_size, dtype
        self._route_settings = route_settings
        self._handoffs: dict[str, str] = {}
        """Where each engine hands over directly, by its name."""
        self._router: Router | None = None
        self._daemon: Daemon | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="kvlane-demo-")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Engines end first, so that they have their daemon to the end.
        last = [process for process in (self._router, self._daemon) if process is not None]
        end_all([*self.engines.values(), *last])
        self._folder.cleanup()

    @property
    def router(self) -> Router:
        """The router of all engines."""
        assert self._router is not None, "the router was not started"
        return self._router

    def start(self, show: Callable[[str], object]) -> None:
        """Starts everything, and waits until all engines answer and the router has them. `show` gets a sentence for
        each thing that is ready. Raises ProcessFailed."""
        began = time.monotonic()
        socket = Path(self._folder.name) / "route.sock"
        if self.is_direct:
            everyone = [*self.plan.engines, self.plan.joins]
            self._handoffs = {node.name: f"127.0.0.1:{free_port()}" for node in everyone}
        else:
            # No scrub: it would find the bytes that the control makes wrong.
            flags = ("--scrub-rate", "0")
            gpu = "off" if self.plan.joins.gpu is None else "auto"
            folder = Path(self._folder.name)
            self._daemon = Daemon(folder, self._pool_size, self._logs, gpu, ssd=False, flags=flags)
            self._daemon.start()
            show("the daemon is ready")
        handoffs = self._handoffs if self.is_direct else None
        self._router = Router(self.plan, self._logs / "router.log", socket, self._route_settings, handoffs)
        for node in self.plan.engines:
            self._start_engine(node)
        waiting = list(self.plan.engines)

        def all_answer() -> bool:
            for node in list(waiting):
                if self.engines[node.name].is_ready():
                    waiting.remove(node)
                    show(f"{node.name} answers at {node.url} after {time.monotonic() - began:.0f} s")
            return not waiting

        wait_until("all engines answer", all_answer)
        wait_until(
            "the router finds its engines ready",
            lambda: {self.router.states().get(node.name) for node in self.plan.engines} == {"ready"},
        )
        show(f"the router serves at {self.plan.router_url}, and shows its nodes at {self.plan.admin_url}")
        self.memory = {name: engine.memory() for name, engine in self.engines.items()}

    def start_joining(self) -> ServedEngine:
        """Starts the further engine and adds it to the router, without waiting."""
        self.router.add(self.plan.joins)
        return self._start_engine(self.plan.joins)

    def settle(self) -> None:
        """Waits until all that engines have saved can be found."""
        with_tool(self._address, lambda tool: tool.settle(30_000))

    def make_pool_wrong(self) -> None:
        """Permutes all bytes of the pool, block by block: they are as well-formed as before, and belong to other
        tokens."""
        with_tool(self._address, _turn_around)

    def forget_all(self) -> None:
        """Drops every block of the daemon."""

        def drop(tool: Tool) -> None:
            status: Any = tool.status()
            tool.drop_namespaces([each["namespace"] for each in status["namespaces"]])

        with_tool(self._address, drop)

    @property
    def _address(self) -> str:
        assert self._daemon is not None, "the daemon was not started"
        return self._daemon.address

    def _start_engine(self, node: Node) -> ServedEngine:
        log = self._logs / f"{node.name}.log"
        flags: list[str] = []
        if self.is_direct:
            direct = {"kvlane.daemon": "off", "kvlane.direct": "on"}
            direct["kvlane.direct.listen"] = self._handoffs[node.name]
            connector = connector_config("") | {"kv_connector_extra_config": direct}
        else:
            # Several engines on two cores may keep the daemon off the CPU for longer than a lookup may take by default.
            connector = connector_config(self._address, lookup_timeout_ms=5000.0)
        if self.is_direct and node.gpu is None:
            flags += ["--max-num-batched-tokens", str(CHUNK_TOKENS)]
        if node.gpu is not None:
            flags += ["--gpu-memory-utilization", f"{self.plan.share_of_gpu(node):.2f}"]
        engine = ServedEngine(
            node,
            self.model,
            connector,
            log,
            self.plan.threads,
            self._max_tokens,
            self.kv_cache,
            flags,
            dtype=self._dtype,
        )
        self.engines[node.name] = engine
        return engine


def with_tool(address: str, act: Callable[[Tool], object]) -> None:
    """Does something at the daemon that only tools may do."""
    tool = Tool(address, 30_000.0)
    try:
        act(tool)
    finally:
        tool.close()


def _turn_around(tool: Tool) -> None:
    # Moves numbers of four bytes, so numbers keep their sizes and replace other numbers.
    window = 1 << 20
    for offset in range(0, int(str(tool.status()["pool_bytes"])), window):
        content = tool.read_pool(offset, window)
        if any(content):
            numbers = memoryview(content).cast("I")
            tool.write_pool(offset, numbers[::-1].tobytes())
