"""The blocks of prompts as files, in place of another engine that computes them: what `LandingConnector` reads."""

from __future__ import annotations

import array
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Offered:
    """What the other engine has said of a prompt so far."""

    blocks: int = 0  # from the prompt's beginning on, that may be read
    ended: bool = False  # no more come


class PeerFolder:
    """One file for each block and rank, and one for what may be read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, name: str, index: int, rank: int) -> Path:
        return self.path / f"{name}.{index}.{rank}"

    def blocks(self, name: str) -> int:
        """Blocks of a prompt that have been computed."""
        return len(list(self.path.glob(f"{name}.*.0")))

    def offer(self, name: str, blocks: int | None = None, ended: bool = True) -> None:
        """From the engine's next step on this many blocks may be read, by default all."""
        said = {"blocks": self.blocks(name) if blocks is None else blocks, "ended": ended}
        self._replace(f"{name}.offered", json.dumps(said))

    def offered(self, name: str) -> Offered:
        try:
            return Offered(**json.loads((self.path / f"{name}.offered").read_text()))
        except FileNotFoundError:
            return Offered()

    def copy(self, name: str, other: str) -> None:
        """The same blocks under another name; none of them is offered yet."""
        for file in self.path.glob(f"{name}.*.*"):
            (self.path / f"{other}{file.name.removeprefix(name)}").write_bytes(file.read_bytes())

    def flip(self, name: str, index: int) -> None:
        """One byte of one value in a block: its exponent, so that the value becomes huge."""
        file = self.file(name, index, rank=0)
        data = bytearray(file.read_bytes())
        values = array.array("f", bytes(data))
        at = next(number for number, value in enumerate(values) if 0.01 < abs(value) < 1)
        data[4 * at + 3] ^= 0x40
        file.write_bytes(data)

    def note(self, name: str, **facts: Any) -> None:
        """Something that a test outside of the engine's process reads."""
        self._replace(f"{name}.note", json.dumps(facts))

    def noted(self, name: str) -> dict[str, Any]:
        return json.loads((self.path / f"{name}.note").read_text())

    def _replace(self, file: str, text: str) -> None:
        unfinished = self.path / f"{file}-"
        unfinished.write_text(text)
        unfinished.rename(self.path / file)
