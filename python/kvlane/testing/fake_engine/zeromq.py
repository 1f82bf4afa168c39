"""pyzmq, which only pings and KV events need."""

from __future__ import annotations

from typing import Any


def load() -> Any:
    """The module zmq. Exits with advice if it is not installed."""
    try:
        import zmq
    except ImportError:
        raise SystemExit("this needs pyzmq: pip install pyzmq") from None
    return zmq
