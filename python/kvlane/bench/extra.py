"""The packages of the extra `bench`, each imported at its first use: every `--help` works without them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

NAMES = ("aiohttp", "matplotlib", "numpy", "tqdm")

if TYPE_CHECKING:
    import aiohttp
    import numpy
    from tqdm import tqdm
else:

    class _AtFirstUse:
        """Stands for a package; asks it for whatever it is asked for, once each."""

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


__all__ = ["NAMES", "aiohttp", "numpy", "tqdm"]
