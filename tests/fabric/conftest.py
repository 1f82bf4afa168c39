"""Tests that need another user run as those of tests/daemon do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "daemon"))

from another_user import pytest_pyfunc_call  # noqa: F401 - a hook
