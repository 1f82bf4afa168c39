"""The packages of the extra `bench`, each imported at its first use: every `--help` works without them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

NAMES = ("aiohttp", "matplotlib", "numpy", "tqdm")

if TYPE_CHECKING:
    import aiohttp
    import numpy
    from tqdm import tqdm
else:

    class _AtFirstUse:
        """Stands for a package, and imports it at its first attribute."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            found = getattr(importlib.import_module(self._name), attribute)
            setattr(self, attribute, found)
            return found

    aiohttp = _AtFirstUse("aiohttp")
    numpy = _AtFirstUse("numpy")

    def tqdm(*arguments: Any, **named: Any) -> Any:
        """A progress bar of the package tqdm."""
        from tqdm import tqdm as bar

        return bar(*arguments, **named)


def missing(names: Sequence[str]) -> list[str]:
    """The packages of this list that this Python lacks."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def install(names: Sequence[str]) -> str:
    """The command that installs these packages for this Python: pip's, or uv's if there is no pip."""
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {sys.executable} {' '.join(names)}"
    return f"{sys.executable} -m pip install {' '.join(names)}"


def lacks() -> str | None:
    """A sentence that names the packages that this Python lacks and the command that installs them, or None."""
    names = missing(NAMES)
    return f"kvlane bench needs {', '.join(names)}: {install(names)}" if names else None


__all__ = ["NAMES", "aiohttp", "install", "lacks", "missing", "numpy", "tqdm"]
