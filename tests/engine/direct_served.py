"""Two served engines that hand over directly, with no daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ports import free_port
from served import ServedEngine
from tiny_model import build_tiny_model


@dataclass(frozen=True)
class Pair:
    """Both engines."""

    prefill: ServedEngine
    decode: ServedEngine
    handoff: str
    """Where the one that prefills hands over."""


@contextmanager
def served_pair(folder: Path, environment: dict[str, str] | None = None) -> Iterator[Pair]:
    """Both, once they answer."""
    handoff = f"127.0.0.1:{free_port()}"
    model = build_tiny_model(folder / "tiny")
    nobody = {"kvlane.daemon": "off", "kvlane.direct": "on"}
    transfer = {
        "kv_connector": "KVLaneConnector",
        "kv_connector_module_path": "kvlane.connector",
        "kv_role": "kv_both",
    }
    extras = {"prefill": {**nobody, "kvlane.direct.listen": handoff}, "decode": nobody}
    engines = [
        ServedEngine(
            model,
            "",
            folder / f"{name}.log",
            transfer={**transfer, "kv_connector_extra_config": extra},
            environment=environment,
        )
        for name, extra in extras.items()
    ]
    try:
        for each in engines:
            each.wait()
        prefill, decode = engines
        yield Pair(prefill, decode, handoff)
    finally:
        for each in engines:
            each.close()
