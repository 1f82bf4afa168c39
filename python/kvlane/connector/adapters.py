"""The identity of each LoRA adapter of an engine: the content that vLLM loaded, from its first possible load on.

vLLM loads an adapter on `add_lora`, or when it schedules the first request with it. It loads the adapter again after it
had to make room for others. vLLM names an adapter by a number (`lora_int_id`), and reads the files at that moment,
whatever their content. So the connector reads an adapter before vLLM can load it for the first time, and from then on
its files have to stay the same. If they change, the connector cannot know which content vLLM has, and requests of the
adapter are neither looked up nor saved any more.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvlane.connector.digest import JsonValue, digest16
from kvlane.connector.guard import logger
from kvlane.connector.model_files import hub_reference, model_folder
from kvlane.connector.vllm_protocols import LoraRequest
from kvlane.connector.weights_content import FilesChanging, Signature, read_content, signature_of
from kvlane.connector.weights_memo import YOUNG_NS

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

T = TypeVar("T")
CONFIGURATION = "adapter_config.json"
# In the order in which vLLM looks for them; it loads the first that exists.
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
WHOLE_BELOW = 256 << 10
"""Tensors of fewer bytes are read whole; adapters are small."""
MAX_ADAPTERS = 65_536
"""Adapters that one engine remembers; later ones take no part."""
CHECK_SECONDS = 0.02
"""A check of an adapter's files holds for this many seconds within a step, because requests may wait long between two
steps."""
WHAT_TO_DO = "load changed weights under a new name and from a new folder"


class Withdrawn(Exception):
    """Why an adapter takes no part in the cache."""


class Moment:
    """The engine's present step, and the time by its scheduler's clock. Empty until `at` is called."""

    def __init__(self) -> None:
        self._step = 0
        self._now: float | None = None

    def at(self, now: float) -> None:
        """Sets the time, in seconds of the scheduler's clock."""
        self._now = now

    def next_step(self) -> None:
        """Makes the next use of each adapter check its files again."""
        self._step += 1

    def stamp(self) -> tuple[int, float] | None:
        """The step and the time; None without a time. For `is_near`."""
        return None if self._now is None else (self._step, self._now)

    def is_near(self, former: tuple[int, float] | None) -> bool:
        """Whether a stamp was taken in this step, less than CHECK_SECONDS ago."""
        if former is None or self._now is None:
            return False
        return former[0] == self._step and self._now - former[1] < CHECK_SECONDS


class Adapter:
    """One adapter as an engine's requests name it: number, name and path together."""

    def __init__(
        self,
        name: str,
        path: str,
        meaning: JsonValue,
        now_ns: Callable[[], int],
        moment: Moment | None = None,
    ) -> None:
        self.name = name
        self._moment = moment or Moment()
        self._looked: tuple[int, float] | None = None
        self._was_shared = False
        self._hub_folder: Path | None = None
        self._path = path
        self._meaning = meaning
        self._now_ns = now_ns
        self._withdrawn = False
        self._settled = False
        self._signature: Signature = ()
        self.digest = b""
        """16 bytes; valid while the adapter is shared."""

    def shared(self) -> bool:
        """Whether the content that vLLM has loaded is certain. Checks the files once in a step."""
        if self._withdrawn:
            return False
        if not self._moment.is_near(self._looked):
            self._looked = self._moment.stamp()
            self._was_shared = self.check()
        return self._was_shared

    def check(self) -> bool:
        """Checks the files, and returns whether the content that vLLM has loaded is certain."""
        if self._withdrawn:
            return False
        try:
            return self._unchanged()
        except (Withdrawn, OSError, FilesChanging) as reason:
            self.withdraw(str(reason))
            return False

    def read(self) -> None:
        """Takes the present content of the files for what vLLM loads from now on."""
        try:
            self._signature, self.digest = self._content()
            self._settled = self._is_old(self._signature)
        except (Withdrawn, OSError, FilesChanging) as reason:
            self.withdraw(str(reason))

    def withdraw(self, reason: str) -> None:
        """Excludes its requests from the cache from now on, and logs the first reason."""
        if not self._withdrawn:
            self._withdrawn = True
            # Log: an adapter's files changed or cannot be read; its requests are computed, others use the cache.
            # Do: load changed adapters under a new name from a new folder.
            logger.warning(
                "kvlane: requests with the LoRA adapter %r take no part in the cache any more: %s; %s",
                self.name,
                reason,
                WHAT_TO_DO,
            )

    def changed_at_ns(self) -> int:
        """The latest change time of its files when they were read."""
        return max((ctime for *_, ctime in self._signature), default=0)

    def _unchanged(self) -> bool:
        if signature_of(self._files()) != self._signature:
            raise Withdrawn("its files have changed, and vLLM may have loaded the old ones or the new ones")
        if self._settled:
            return True
        if not self._is_old(self._signature):
            # They could still be written without a change of their times.
            return False
        if self._content() != (self._signature, self.digest):
            raise Withdrawn("its files changed while vLLM loaded them")
        self._settled = True
        return True

    def _content(self) -> tuple[Signature, bytes]:
        files = self._files()
        before = signature_of(files)
        content = read_content(files, WHOLE_BELOW)
        if signature_of(files) != before:
            raise Withdrawn("its files changed while they were read")
        return before, digest16([content.digest, self._meaning])

    def _files(self) -> list[Path]:
        kept = self._hub_folder
        if kept is None or os.path.exists(self._path) or not _is_meant(kept):
            kept = _folder(self._path)
            # The folder that the hub's library found stays the same while the name means this commit.
            self._hub_folder = kept if kept is not None and _is_meant(kept) else None
        return _files_in(kept)

    def _is_old(self, signature: Signature) -> bool:
        now = self._now_ns()
        return all(ctime <= now - YOUNG_NS for *_, ctime in signature)


class Adapters:
    """The adapters of one engine."""

    def __init__(
        self,
        meaning: JsonValue = None,
        path_is_hashed: bool = False,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`meaning`: the part of the engine's configuration that changes an adapter's effect, as JSON.
        `path_is_hashed`: vLLM's own block hashes distinguish adapters of one name by their path."""
        self._meaning = meaning
        self._path_is_hashed = path_is_hashed
        self.loads_are_seen = True
        """Whether `loading` is called each time that vLLM loads an adapter without a request for it."""
        self.moment = Moment()
        """Set by the scheduler role."""
        self._now_ns = now_ns
        self._started_ns = now_ns()
        self._by_key: dict[tuple[int, str, str], Adapter] = {}
        self._by_number: dict[int, Adapter] = {}
        self._by_hash: dict[tuple[str, ...], Adapter] = {}

    def of(self, lora_request: LoraRequest | None) -> Adapter | None:
        """The adapter of a request that has arrived; None for requests without one."""
        if lora_request is None:
            return None
        return self._of(lora_request)

    def loading(self, lora_request: LoraRequest, load: Callable[[], T]) -> T:
        """Runs `load`, by which vLLM loads an adapter before any request names it."""
        key = _key(lora_request)
        new = key not in self._by_key
        if new and _is_here(lora_request.lora_path):
            self.of(lora_request)
        try:
            done = load()
        except BaseException:
            if new:
                self._forget(key)
            raise
        # An adapter from the hub is on this host only after the load.
        adapter = self.of(lora_request)
        assert adapter is not None
        adapter.check()
        return done

    def _of(self, lora_request: LoraRequest) -> Adapter:
        key = _key(lora_request)
        known = self._by_key.get(key)
        if known is not None:
            if getattr(lora_request, "load_inplace", False):
                known.withdraw("it was loaded in place of itself")
            return known
        _, name, path = key
        extra = bool(getattr(lora_request, "is_3d_lora_weight", False))
        adapter = Adapter(
            name, path, [self._meaning, extra] if extra else [self._meaning], self._now_ns, self.moment
        )
        if len(self._by_key) >= MAX_ADAPTERS:
            adapter.withdraw(f"this engine has had {MAX_ADAPTERS} adapters before")
            return adapter
        self._by_key[key] = adapter
        adapter.read()
        self._compare(adapter, lora_request)
        return adapter

    def _compare(self, adapter: Adapter, lora_request: LoraRequest) -> None:
        number, name, path = _key(lora_request)
        if getattr(lora_request, "load_inplace", False):
            adapter.withdraw("it was loaded in place of another one")
        if getattr(lora_request, "tensorizer_config_dict", None):
            adapter.withdraw("it does not come from files of this host")
        if not self.loads_are_seen and adapter.changed_at_ns() > self._started_ns - YOUNG_NS:
            adapter.withdraw("its files are newer than the engine, so vLLM may have loaded older ones")
        other = self._by_number.setdefault(number, adapter)
        if other is not adapter:
            # vLLM looks at the number alone and keeps the one that it loaded first.
            other.withdraw(f"another adapter, {name!r}, has the same number")
            adapter.withdraw(f"another adapter, {other.name!r}, has the same number")
        hashed = (name, path) if self._path_is_hashed else (name,)
        other = self._by_hash.setdefault(hashed, adapter)
        if other is not adapter and other.digest != adapter.digest:
            # vLLM's own prefix cache mixes their blocks.
            for each in (other, adapter):
                each.withdraw("two adapters of different content have had this name")

    def _forget(self, key: tuple[int, str, str]) -> None:
        adapter = self._by_key.pop(key, None)
        for table in (self._by_number, self._by_hash):
            for name in [name for name, each in table.items() if each is adapter]:
                del table[name]  # type: ignore[arg-type]


def watch_loads(adapters: Adapters) -> bool:
    """Makes this process's engine cores call `adapters.loading` whenever they load an adapter. Returns whether that is
    possible."""
    from vllm.v1.engine import core as engine_core

    load = getattr(engine_core.EngineCore, "add_lora", None)
    if load is None:
        return False
    if not hasattr(load, "kvlane_adapters"):

        @functools.wraps(load)
        def add_lora(core: EngineCore, lora_request: LoraRequest, *more: object, **named: object) -> bool:
            run: Callable[[], bool] = functools.partial(load, core, lora_request, *more, **named)
            for each in list(add_lora.kvlane_adapters):  # type: ignore[attr-defined]
                run = functools.partial(each.loading, lora_request, run)
            return run()

        add_lora.kvlane_adapters = weakref.WeakSet()  # type: ignore[attr-defined]
        engine_core.EngineCore.add_lora = add_lora
    engine_core.EngineCore.add_lora.kvlane_adapters.add(adapters)  # type: ignore[attr-defined]
    return True


def adapter_files(path: str) -> list[Path]:
    """The files of an adapter that vLLM reads. Raises Withdrawn if they are not here."""
    return _files_in(_folder(path))


def _files_in(folder: Path | None) -> list[Path]:
    if folder is None:
        raise Withdrawn("its files are not on this host yet")
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / CONFIGURATION, folder / name]
    raise Withdrawn(f"{folder} has none of {', '.join(WEIGHTS)}")


def _folder(path: str) -> Path | None:
    """The adapter's folder as vLLM finds it, without a download."""
    if os.path.isabs(path) or path.startswith("~"):
        return Path(path).expanduser()
    return model_folder(path, None, None)


def _is_meant(folder: Path) -> bool:
    """Whether a folder is the hub's local copy of the commit that its name means now."""
    if folder.parent.name != "snapshots":
        return False
    reference = hub_reference(folder, None)
    try:
        return reference is not None and reference.read_text() == folder.name
    except OSError:
        return False


def _is_here(path: str) -> bool:
    try:
        return bool(adapter_files(path))
    except Withdrawn:
        return False


def _key(lora_request: LoraRequest) -> tuple[int, str, str]:
    return lora_request.lora_int_id, lora_request.lora_name, lora_request.lora_path
