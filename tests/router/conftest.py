"""Lets the tests of this folder import its helpers, and those of tests/daemon for processes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "daemon")]

from another_user import pytest_pyfunc_call  # noqa: E402, F401 - a hook
