"""Makes importable the helpers of this folder and those beside the tests of daemon and router."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("router", "daemon"))]
