"""The ranks of an all-to-all, and how they tell each other bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import TIMEOUT_MAX
from typing import Any

from kvlane import _core
from kvlane.moe._meeting import Meeting


@dataclass(frozen=True)
class Group:
    """The ranks of an all-to-all: processes of one user on one host."""

    rank: int
    size: int
    all_gather: Callable[[bytes], list[bytes]]
    """Gives every rank the bytes of all, in the order of ranks. Called twice, when the all-to-all is made."""

    def __post_init__(self) -> None:
        _check(self.rank, self.size)

    @classmethod
    def of_torch(cls, group: Any = None) -> Group:
        """The ranks of a torch.distributed group, by default all. ValueError if it moves only GPU memory (nccl)."""
        import torch
        import torch.distributed as dist

        if dist.get_backend(group) == "nccl":
            raise ValueError(
                "a group of nccl moves only GPU memory: give torch.distributed.new_group(backend='gloo')"
            )
        size = dist.get_world_size(group)

        def all_gather(told: bytes) -> list[bytes]:
            lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(size)]
            dist.all_gather(lengths, torch.tensor([len(told)], device="cpu"), group)
            longest = max(1, *(int(length) for length in lengths))
            own = torch.zeros(longest, dtype=torch.uint8, device="cpu")
            own[: len(told)] = torch.tensor(list(told), dtype=torch.uint8, device="cpu")
            found = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(found, own, group)
            return [bytes(each[: int(length)].tolist()) for each, length in zip(found, lengths, strict=True)]

        return cls(dist.get_rank(group), size, all_gather)

    @classmethod
    def at(cls, path: str | os.PathLike[str], rank: int, size: int, timeout: float = 60.0) -> Group:
        """The ranks of one host that come to `path`, where rank 0 has a Unix socket until all are there. Rank 0 waits
        for the others, and they for rank 0. `timeout`: longest wait, in seconds, here and for each all-gather.

        ValueError for a rank that cannot be; NotJoined if ranks do not come, or a process of another user is there. An
        all-gather that fails ends the group for all ranks.
        """
        _check(rank, size)
        if not 0 < timeout <= TIMEOUT_MAX:
            raise ValueError(f"timeout has to be above 0 and at most {TIMEOUT_MAX:g} s, and not {timeout}")
        return cls(rank, size, Meeting(os.fspath(path), rank, size, timeout).all_gather)


def _check(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not one of {size}")


class Joining:
    """A rank while it joins its group. The core turns what `all_gather` raised into a sentence, so it is kept here."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self._raised: BaseException | None = None
        self._has_begun = False

    def all_gather(self, told: bytes) -> list[bytes]:
        self._has_begun = True
        try:
            return list(self._group.all_gather(told))
        except BaseException as error:
            self._raised = error
            raise

    def raise_what_was_raised(self) -> None:
        if self._raised is not None:
            raise self._raised from None

    def decline(self, error: Exception) -> None:
        """Tells the other ranks why this one cannot join, unless the core has: they wait for it."""
        if not self._has_begun:
            _core.moe_decline(self.size, str(error) or type(error).__name__, self._group.all_gather)
