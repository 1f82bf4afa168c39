"""KV events for listeners about the daemon's blocks.

BlockStored: a save of this engine has ended. BlockRemoved: a block was evicted, damaged or dropped; all blocks, if the
daemon was lost or started anew, or the engine asked too late. AllBlocksCleared: the engine has other weights. Blocks on
the SSD or saved by other engines are not announced. A daemon from before the journal cannot report them, and the log
says so once.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlane.connector import events
from kvlane.connector.counters import Counters
from kvlane.connector.groups import CacheGroup
from kvlane.connector.vllm_protocols import KVEvent

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockStored

# Announced blocks at the same time, some 200 bytes each. Above this the oldest are withdrawn.
ANNOUNCED_MAX = 1_000_000
# Remembered blocks of the last saves, each with its event and its state at the daemon.
RECENT_MAX = 16_384
# Hashes in one event.
BATCH = 1024


@dataclass
class Announcement:
    """Consecutive blocks that are being saved, and the event for them."""

    group: int
    keys: list[bytes]
    event: BlockStored


@dataclass(slots=True)
class _Recent:
    """A block of one of the last saves."""

    event: BlockStored
    index: int
    visible: bool | None = None
    """The daemon's last entry: whether lookups find the block. None without an entry."""
    ended: bool = False
    """The save has ended, so the block may be announced."""


class Announcements:
    """Follows the daemon's journal. A block's key is the first 16 bytes of its stored hash, and its group.

    A save's blocks are announced at its end. The journal says which of them the daemon has evicted by then or later,
    and which blocks of a failed save can be found. Listeners may miss some stored blocks. Removed blocks stay announced
    only until the engine reads the journal.
    """

    def __init__(self, groups: Sequence[CacheGroup], counters: Counters, most: int = ANNOUNCED_MAX) -> None:
        self._groups = {group.index: group.group_id for group in groups}
        self._suffixes = {group.index: bytes([group.index]) for group in groups}
        self._counters = counters
        self._most = most
        self._announced: dict[bytes, object] = {}
        """The announced hash by key, the oldest first."""
        self._recent: OrderedDict[bytes, _Recent] = OrderedDict()
        self.era = 0
        """Counts the times when all announcements ended. Saves of a former era announce nothing."""

    def __len__(self) -> int:
        return len(self._announced)

    def begin(self, group: CacheGroup, stored: Sequence[bytes], event: BlockStored) -> Announcement:
        """Begins the announcement of blocks that are to be saved; `ended` announces them."""
        suffix = self._suffixes[group.index]
        keys = [each[:16] + suffix for each in stored]
        for index, key in enumerate(keys):
            self._recent[key] = _Recent(event, index)
            self._recent.move_to_end(key)
        while len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)
        return Announcement(group.index, keys, event)

    def ended(self, begun: Iterable[Announcement], ok: bool, era: int) -> list[KVEvent]:
        """The events at the end of a save. `ok`: the daemon had all of its blocks."""
        if era != self.era:
            return []
        made: list[KVEvent] = []
        for each in begun:
            wanted = [self._is_there(key, ok) for key in each.keys]
            if all(wanted):
                made.append(each.event)
            else:
                alone = (index for index, is_wanted in enumerate(wanted) if is_wanted)
                made += [events.one_block(each.event, index) for index in alone]
            for index, key in enumerate(each.keys):
                if wanted[index]:
                    self._announce(key, each.event, index)
        return made + self._bound()

    def _is_there(self, key: bytes, ok: bool) -> bool:
        block = self._recent.get(key)
        if block is None:
            return ok
        block.ended = True
        return ok if block.visible is None else block.visible

    def _announce(self, key: bytes, event: BlockStored, index: int) -> None:
        self._announced.pop(key, None)
        self._announced[key] = event.block_hashes[index]

    def changed(self, start_again: bool, changes: Iterable[tuple[int, bytes, bool]]) -> list[KVEvent]:
        """The events for changes of the daemon's blocks: (group, hash, whether a lookup finds it), in order. With
        `start_again` the daemon has lost changes, so earlier events may be wrong."""
        made: list[KVEvent] = []
        if start_again:
            made += self._withdraw(self._announced)
            for block in self._recent.values():
                block.visible = False
        gone: dict[bytes, object] = {}
        for group, stored, visible in changes:
            key = stored + self._suffixes[group]
            block = self._recent.get(key)
            if block is not None:
                block.visible = visible
            if not visible:
                if key in self._announced:
                    gone[key] = self._announced.pop(key)
            elif block is not None and block.ended and key not in self._announced:
                # Events have the journal's order, because this block may be in `gone` too.
                made += self._withdraw(gone)
                made.append(events.one_block(block.event, block.index))
                self._announce(key, block.event, block.index)
        return made + self._withdraw(gone) + self._bound()

    def withdraw_all(self) -> list[KVEvent]:
        """The events when the scheduler has left the daemon: no announced block can be loaded any more."""
        made = self._withdraw(self._announced)
        self.forget()
        return made

    def forget(self) -> None:
        """Forgets all announced blocks, because listeners were told that all is cleared."""
        self._announced.clear()
        self._recent.clear()
        self.era += 1

    def _bound(self) -> list[KVEvent]:
        """Withdraws the oldest blocks above the bound, and some more, so that the next ones do not reach it at once."""
        if len(self._announced) <= self._most:
            return []
        count = len(self._announced) - self._most + self._most // 64
        oldest = dict(itertools.islice(self._announced.items(), count))
        for key in oldest:
            del self._announced[key]
        return self._withdraw(oldest)

    def _withdraw(self, blocks: dict[bytes, object]) -> list[KVEvent]:
        """The events that withdraw these blocks. Takes key and announced hash, and empties `blocks`."""
        by_group: dict[int, list[object]] = {}
        for key, hash_ in blocks.items():
            by_group.setdefault(key[-1], []).append(hash_)
        self._counters.add("withdrawn_blocks", len(blocks))
        blocks.clear()
        return [
            events.blocks_removed(self._groups[group], hashes[first : first + BATCH])
            for group, hashes in by_group.items()
            for first in range(0, len(hashes), BATCH)
        ]
