"""Makes the helpers of the connector's tests importable: the tiny model and the daemon."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "connector")]
