"""pyzmq, which only pings and KV events need."""

from __future__ import annotations

from typing import Any

from kvlane.bench import extra


def load() -> Any:
    """The module zmq. Exits with advice if it is not installed."""
    try:
        import zmq
    except ImportError:
        raise SystemExit(f"this needs pyzmq: {extra.install(['pyzmq'])}") from None
    return zmq
