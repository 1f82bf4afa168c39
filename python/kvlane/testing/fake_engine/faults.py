"""Faults of a fake engine, switched on while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KINDS: dict[str, tuple[type, ...]] = {
    "refuse": (bool,),
    "status": (int,),
    "poison": (str,),
    "hang_before_first_byte": (bool,),
    "die_at_chunk": (int,),
    "exit_at_chunk": (int,),
    "slow_health": (int, float),
    "garbage": (bool,),
    "bad_length": (bool,),
    "close_idle_connections": (bool,),
    "retry_after": (int, float),
    "hand_nothing_over": (bool,),
}
"""Each fault and the values that it may have; options.py describes them."""


class BadFault(ValueError):
    """A fault with an unknown name, or with a value that it cannot have."""


@dataclass
class _Fault:
    value: Any
    left: float


class Faults:
    """The faults that are on. Each ends after `times` uses, if that was given."""

    def __init__(self) -> None:
        self._on: dict[str, _Fault] = {}
        self.path: str | None = None
        """The paths on which they happen; None is every path that generates."""

    def __bool__(self) -> bool:
        return bool(self._on)

    def set(self, wanted: dict[str, Any]) -> None:
        """Replaces all faults. Raises BadFault and changes nothing if one cannot be."""
        rest = dict(wanted)
        times, path = rest.pop("times", None), rest.pop("path", None)
        if times is not None and (type(times) is not int or times < 1):
            raise BadFault("times must be an integer of at least 1")
        if path is not None and not isinstance(path, str):
            raise BadFault("path must be a string")
        for name, value in rest.items():
            if name not in KINDS:
                raise BadFault(f"there is no fault {name!r}; there are {', '.join(KINDS)}")
            is_negative = isinstance(value, int | float) and value < 0
            if type(value) not in KINDS[name] or is_negative or value == "":
                raise BadFault(f"{name} cannot be {value!r}")
        left = float("inf") if times is None else times
        self._on = {name: _Fault(value, left) for name, value in rest.items() if value is not False}
        self.path = path

    def take(self, name: str) -> Any:
        """The value of a fault that is on, else None; counts as one use."""
        fault = self._on.get(name)
        if fault is None:
            return None
        fault.left -= 1
        if fault.left <= 0:
            del self._on[name]
        return fault.value

    def peek(self, name: str) -> Any:
        """The value of a fault that is on, else None. Does not use the fault up."""
        fault = self._on.get(name)
        return None if fault is None else fault.value

    def shown(self) -> dict[str, Any]:
        """The faults that are on, with how often each still happens; null is without end."""
        endless = float("inf")
        return {
            name: {
                "value": each.value,
                "left": None if each.left == endless else each.left,
                "path": self.path,
            }
            for name, each in self._on.items()
        }
