"""What tests of benchmarks share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).resolve().parents[2] / "bench" / "gpu"


@pytest.fixture
def gpu_script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a script of bench/gpu by its name. Each test imports all of them anew, because scripts change modules."""
    monkeypatch.syspath_prepend(str(GPU))
    for path in GPU.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return importlib.import_module
