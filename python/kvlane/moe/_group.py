"""The ranks of an all-to-all, and how they tell each other bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvlane.moe._meeting import Meeting


@dataclass(frozen=True)
class Group:
    """The ranks of an all-to-all: processes of one user on one host."""

    rank: int
    size: int
    all_gather: Callable[[bytes], list[bytes]]
    """Gives every rank the bytes of all, in the order of ranks. Called twice, when the all-to-all is made."""

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
    def at(cls, path: str, rank: int, size: int, timeout: float = 60.0) -> Group:
        """The ranks of one host that come to `path`, where rank 0 has a Unix socket until all are there. Rank 0 waits
        for the others, and they for rank 0. `timeout`: longest wait, in seconds, here and for each all-gather.

        ValueError for a rank that cannot be; NotJoined if ranks do not come, or a process of another user is there. An
        all-gather that fails ends the group for all ranks.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size}")
        return cls(rank, size, Meeting(path, rank, size, timeout).all_gather)


class Noted:
    """A group's `all_gather`, with what it raised: the core turns that into a sentence."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._raised: BaseException | None = None

    def all_gather(self, told: bytes) -> list[bytes]:
        try:
            return list(self._group.all_gather(told))
        except BaseException as error:
            self._raised = error
            raise

    def raise_what_was_raised(self) -> None:
        if self._raised is not None:
            raise self._raised from None
