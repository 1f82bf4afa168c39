"""Identifies an engine's start: the same in its scheduler and its workers, and different in every other start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlane.connector.weights_memo import YOUNG_NS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class EngineStart:
    """One start of an engine."""

    life: tuple[str, str]
    """Two ids that vLLM gives it. A user may choose the first one, which then is the same after a restart."""
    began_ns: int | None
    """Nanoseconds since 1970 by this host's clock, before any process of the engine read weights; None if vLLM does not
    say."""

    @staticmethod
    def of(vllm_config: VllmConfig) -> EngineStart:
        """By what vLLM sends to all processes of an engine."""
        instance = str(getattr(vllm_config, "instance_id", ""))
        # vLLM builds the configuration before workers start, and takes the time in nanoseconds for its id; it may
        # append the number of a data-parallel engine.
        moment = instance.partition("_")[0]
        began = int(moment) if moment.isdecimal() and len(moment) == 19 else None
        return EngineStart((str(vllm_config.kv_transfer_config.engine_id), instance), began)

    def is_older_than(self, path: Path) -> bool:
        """Whether a file, or what it is a link to, may have changed after the start. Raises OSError."""
        if self.began_ns is None:
            return False
        changed = max(path.lstat().st_ctime_ns, path.stat().st_ctime_ns)
        # File systems keep times by clocks of their own, some in steps of two seconds.
        return changed > self.began_ns - YOUNG_NS

    def is_older_than_any(self, paths: Iterable[Path]) -> bool:
        """Whether one of them, or a link on the way to it, may have changed after the start. Raises OSError."""
        on_the_way: set[Path] = set()
        for path in paths:
            on_the_way.add(path)
            on_the_way.update(links_to(path))
        return any(self.is_older_than(each) for each in on_the_way)


def links_to(path: Path) -> Iterable[Path]:
    """The symbolic links among a path's folders, and those among their targets' folders. Raises OSError."""
    waiting, seen = [path.absolute()], set()
    while waiting:
        path = waiting.pop()
        for each in path.parents:
            if each in seen or not each.is_symlink():
                continue
            seen.add(each)
            yield each
            waiting.append(each.parent / each.readlink() / "x")
        if path.is_symlink() and path not in seen:
            seen.add(path)
            yield path
            waiting.append(path.parent / path.readlink())
