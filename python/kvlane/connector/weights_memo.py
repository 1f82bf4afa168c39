"""Remembers the content of weight files, in the process and on disk, so an engine's start need not read them again.

A file is recognised by device, inode, size, modification and change time, and a page, because images that are mounted
one after the other may agree in all of the former. A file whose change time is younger than two seconds is not
remembered, because a second write may leave its times unchanged.

On disk each entry is a small file in the user's cache folder, named by the digest of these facts. An entry or a folder
that another user could have written is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvlane.connector.weights_content import (
    FilesChanging,
    Signature,
    WeightsContent,
    page_of,
    read_content,
    signature_of,
)

VERSION = 1
YOUNG_NS = 2_000_000_000
ENTRIES = 64
"""Kept on disk; each engine start may add one."""
MAX_ENTRY_BYTES = 4096
ATTEMPTS = 3


def memo_folder() -> Path | None:
    """`kvlane/weights` in the user's cache folder; None for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG standard has relative paths ignored.
        base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "kvlane" / "weights"


class WeightsMemo:
    """Entries in this process and in a folder. A folder that cannot be used is left out."""

    def __init__(self, folder: Path | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._folder = folder
        self._now_ns = now_ns
        self._cached: dict[str, WeightsContent] = {}

    def content(self, files: Sequence[Path]) -> WeightsContent:
        """The content of these files, remembered or read. Raises OSError, and FilesChanging if they keep changing."""
        for _ in range(ATTEMPTS):
            now = self._now_ns()
            signature = signature_of(files)
            settled = all(ctime <= now - YOUNG_NS for *_, ctime in signature)
            key = _key(signature, files) if settled else ""
            found = self._find(key) if settled else None
            content = found or read_content(files)
            if signature_of(files) != signature:
                continue
            if settled and found is None:
                self._keep(key, content)
            return content
        raise FilesChanging("the weight files changed while they were read")

    def _find(self, key: str) -> WeightsContent | None:
        known = self._cached.get(key)
        if known is None and self._folder is not None:
            known = _read_entry(self._folder, key)
        return known

    def _keep(self, key: str, content: WeightsContent) -> None:
        if len(self._cached) >= ENTRIES:
            self._cached.clear()
        self._cached[key] = content
        if self._folder is not None:
            try:
                _write_entry(self._folder, key, content)
            except OSError:
                # A failed write costs time at the next start, and nothing else.
                return


def _key(signature: Signature, files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(repr((VERSION, signature)).encode(), digest_size=16)
    for each in files:
        digest.update(page_of(each))
    return digest.hexdigest()


def _check(key: str, digest: str, weaker: bool) -> str:
    return hashlib.blake2b(repr((VERSION, key, digest, weaker)).encode(), digest_size=8).hexdigest()


def _read_entry(folder: Path, key: str) -> WeightsContent | None:
    """The entry at this name; None if it is missing or damaged, or others may have written it."""
    try:
        opened = _open_folder(folder)
    except OSError:
        return None
    try:
        file = os.open(key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=opened)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or not _only_ours(status):
                return None
            entry = json.loads(os.read(file, MAX_ENTRY_BYTES))
        finally:
            os.close(file)
        digest, weaker = entry["digest"], entry["weaker"]
        if entry["check"] != _check(key, digest, weaker):
            return None
        return WeightsContent(digest, weaker)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    finally:
        os.close(opened)


def _write_entry(folder: Path, key: str, content: WeightsContent) -> None:
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    opened = _open_folder(folder)
    try:
        # Several processes may write the same entry, so each writes a file of its own and renames it.
        part = f"{key}.{os.getpid()}.{threading.get_ident()}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(part, flags, 0o600, dir_fd=opened)
        try:
            entry = {
                "digest": content.digest,
                "weaker": content.weaker,
                "check": _check(key, content.digest, content.weaker),
            }
            os.write(file, json.dumps(entry).encode())
        finally:
            os.close(file)
        os.rename(part, key, src_dir_fd=opened, dst_dir_fd=opened)
        _drop_oldest(opened)
    finally:
        os.close(opened)


def _open_folder(folder: Path) -> int:
    """Opens the folder. Raises PermissionError if others may write it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not _only_ours(os.fstat(opened)):
        os.close(opened)
        raise PermissionError(f"others can write {folder}")
    return opened


def _only_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _drop_oldest(folder: int) -> None:
    names = os.listdir(folder)
    if len(names) <= ENTRIES:
        return
    ages = []
    for name in names:
        try:
            ages.append((os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns, name))
        except FileNotFoundError:
            continue
    for _, name in sorted(ages)[: len(ages) - ENTRIES]:
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            continue
