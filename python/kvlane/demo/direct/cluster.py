"""Starts the demo's engines with progress shown, and ends them all in the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kvlane.bench.processes import connector_config, free_port
from kvlane.demo.pd.plan import Node, Plan
from kvlane.demo.pd.processes import ServedEngine, end_all, wait_until

CHUNK_TOKENS = 256
"""A prefill engine computes a prompt in steps of so many tokens: what one step has computed moves during the next."""


@dataclass(frozen=True)
class Side:
    """An engine, and the address of its hand-offs."""

    node: Node
    engine: ServedEngine
    handoff: str
    """HOST:PORT for other engines."""


class Cluster:
    """All engines of a plan. As a context it ends them at its end."""

    def __init__(self, plan: Plan, model: str, logs: Path, max_tokens: int, kv_cache: int) -> None:
        self.plan = plan
        self.sides: dict[str, Side] = {}
        self._model, self._logs = model, logs
        self._max_tokens, self._kv_cache = max_tokens, kv_cache

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_all(side.engine for side in self.sides.values())

    @property
    def prefill(self) -> list[Side]:
        """The engines that compute prompts."""
        return [self.sides[node.name] for node in self.plan.prefill]

    @property
    def decode(self) -> list[Side]:
        """The engines that decode."""
        return [self.sides[node.name] for node in self.plan.decode]

    def start(self, show: Callable[[str], object]) -> None:
        """Starts all engines and waits until each answers. `show` gets a sentence for each that is ready. Raises
        ProcessFailed."""
        began = time.monotonic()
        for node in self.plan.engines:
            handoff = f"127.0.0.1:{free_port()}"
            # No daemon listens at this address, and none is needed.
            connector = connector_config(f"unix:{self._logs}/no-daemon.sock")
            connector["kv_connector_extra_config"] |= {
                "kvlane.direct": "on",
                "kvlane.direct.listen": handoff,
            }
            engine = ServedEngine(
                node,
                self._model,
                connector,
                self._logs / f"{node.name}.log",
                self.plan.threads,
                self._max_tokens,
                self._kv_cache,
                flags=("--max-num-batched-tokens", str(CHUNK_TOKENS)),
            )
            self.sides[node.name] = Side(node, engine, handoff)
        waiting = list(self.sides.values())

        def all_answer() -> bool:
            for side in list(waiting):
                if side.engine.is_ready():
                    waiting.remove(side)
                    show(
                        f"{side.node.name} answers at {side.node.url}, and hands over at {side.handoff}, after "
                        f"{time.monotonic() - began:.0f} s"
                    )
            return not waiting

        wait_until("all engines answer", all_answer)
