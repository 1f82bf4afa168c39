"""The models and adapters that a fake engine serves."""

from __future__ import annotations

import time
from typing import Any


class Models:
    """The served names, and adapters that were loaded over the first of them."""

    def __init__(self, names: list[str], max_model_len: int) -> None:
        self.names = names
        self.max_model_len = max_model_len
        self._adapters: dict[str, str] = {}
        self._created = int(time.time())

    def __contains__(self, name: str) -> bool:
        return name in self.names or name in self._adapters

    def is_adapter(self, name: str) -> bool:
        return name in self._adapters

    def load(self, name: str, path: str) -> bool:
        """False if the name is taken."""
        if name in self:
            return False
        self._adapters[name] = path
        return True

    def unload(self, name: str) -> bool:
        """False if there is no such adapter."""
        return self._adapters.pop(name, None) is not None

    def card(self) -> dict[str, Any]:
        """The answer of GET /v1/models."""
        base = self.names[0]
        cards = [self._one(name, base, None) for name in self.names]
        cards += [self._one(name, path, base) for name, path in self._adapters.items()]
        return {"object": "list", "data": cards}

    def _one(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": None if parent else self.max_model_len,
        }
