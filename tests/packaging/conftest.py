"""Makes the helpers beside the daemon's tests importable, and takes their folder for sockets."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "daemon"))
