"""Makes helpers of other tests importable: the connector's tiny model and daemon, the router."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("connector", "router", "daemon"))]
