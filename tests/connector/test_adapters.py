"""Blocks of a LoRA adapter are those of the content that vLLM loaded, or nobody's."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Engine, Request, after_a_while
from weights import safetensors

from kvlane.connector import adapters as adapters_module
from kvlane.connector.adapters import CHECK_SECONDS, Adapters
from kvlane.connector.namespace import keyed_hash
from kvlane.testing import FakeCore

SECOND = 1_000_000_000


def write_adapter(folder: Path, weights: bytes = b"weights", **config: Any) -> Path:
    safetensors(folder / "adapter_model.safetensors", {"lora_A": weights, "lora_B": b"b"})
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16} | config))
    return folder


def lora(folder: Path, number: int = 1, name: str = "tuned", **more: Any) -> Any:
    """vLLM's LoRARequest."""
    values = {"load_inplace": False, "is_3d_lora_weight": False} | more
    return SimpleNamespace(lora_int_id=number, lora_name=name, lora_path=str(folder), **values)


def request(request_id: str, adapter: Any, first: int = 1) -> Request:
    made = Request(request_id, [first, *range(100, 121)])
    made.lora_request = adapter
    return made


def run(engine: Engine, request_id: str, adapter: Any, first: int = 1) -> int:
    """A request from its arrival to its end, saves included; gives the tokens that were loaded."""
    one = request(request_id, adapter, first)
    tokens = engine.run(one)
    engine.step({request_id: 0})
    engine.finish(one)
    for _ in range(3):
        engine.step()
    return tokens


def digest(adapter: Any) -> bytes:
    found = Adapters(now_ns=after_a_while).of(adapter)
    assert found is not None and found.shared()
    return found.digest


# Stories


def test_an_adapter_overwritten_while_loaded_gives_its_blocks_to_nobody(tmp_path: Path) -> None:
    """vLLM keeps the weights that it loaded. Their blocks got the identity of the file that lay there by then, and the
    next engine, which loaded the new file, answered with the old weights' blocks."""
    store = FakeCore()
    folder = write_adapter(tmp_path / "adapter")
    engine = Engine(store)
    assert run(engine, "before", lora(folder)) == 0
    assert run(engine, "again", lora(folder)) == 20
    write_adapter(folder, b"WEIGHTS")
    assert run(engine, "after", lora(folder), first=2) == 0
    assert run(engine, "after, once more", lora(folder), first=2) == 0
    restarted = Engine(store, engine_id="restarted")
    assert run(restarted, "same prompt", lora(folder), first=2) == 0
    assert run(restarted, "same prompt, again", lora(folder), first=2) == 20
    stats = engine.scheduler.take_stats()
    assert stats is not None and stats["unshared_requests"] == 2


def test_another_scale_is_another_adapter(tmp_path: Path) -> None:
    """lora_alpha stands in adapter_config.json only: two adapters of equal weights and another alpha shared blocks."""
    store = FakeCore()
    folder = write_adapter(tmp_path / "adapter")
    assert run(Engine(store), "cold", lora(folder)) == 0
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 32}))
    assert run(Engine(store, engine_id="next"), "other alpha", lora(folder)) == 0
    assert run(Engine(store, engine_id="third"), "other alpha", lora(folder)) == 20


def test_a_copied_adapter_is_the_same_whatever_its_times_and_another_content_is_not(tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one")
    copy = tmp_path / "copy"
    shutil.copytree(one, copy)
    os.utime(copy / "adapter_model.safetensors", ns=(1, 1))
    (copy / "README.md").write_text("a copy")
    same = {digest(lora(one)), digest(lora(copy)), digest(lora(one, 7, "another name"))}
    assert len(same) == 1
    others = {
        digest(lora(write_adapter(tmp_path / "retrained", b"WEIGHTS"))),
        digest(lora(write_adapter(tmp_path / "alpha", lora_alpha=32))),
        digest(lora(write_adapter(tmp_path / "rslora", use_rslora=True))),
        digest(lora(write_adapter(tmp_path / "targets", target_modules=["q_proj"]))),
        digest(lora(one, is_3d_lora_weight=True)),
    }
    assert len(others | same) == 6
    block_hash = b"h" * 32
    assert len({block_hash, *(keyed_hash(block_hash, each) for each in others | same)}) == 7


def test_adapters_and_the_model_itself_have_blocks_of_their_own(tmp_path: Path) -> None:
    store = FakeCore()
    engine = Engine(store)
    one, two = (write_adapter(tmp_path / name, name.encode()) for name in ("one", "two"))
    used = [None, lora(one, 1, "one"), lora(two, 2, "two")]
    assert [run(engine, f"r{n}", each) for n, each in enumerate(used + used)] == [0, 0, 0, 20, 20, 20]


def test_an_adapter_loaded_before_its_first_request_is_what_was_loaded(tmp_path: Path) -> None:
    """The server has vLLM load an adapter when it is registered. If its files change before the first request comes,
    vLLM has the old ones, and reading the files at the request would find the new ones."""
    folder = write_adapter(tmp_path / "adapter")
    adapters = Adapters(now_ns=after_a_while)
    assert adapters.loading(lora(folder), lambda: "loaded") == "loaded"
    known = adapters.of(lora(folder))
    assert known is not None and known.shared()
    write_adapter(folder, b"WEIGHTS")
    known = adapters.of(lora(folder))
    assert known is not None and not known.shared()


def test_an_adapter_written_again_while_vllm_loads_it_is_nobodys(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    adapters = Adapters(now_ns=after_a_while)
    adapters.loading(lora(folder), lambda: write_adapter(folder, b"WEIGHTS"))
    known = adapters.of(lora(folder))
    assert known is not None and not known.shared()


def test_an_adapter_that_could_not_be_loaded_may_be_mended(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    adapters = Adapters(now_ns=after_a_while)

    def fail() -> None:
        raise ValueError("no rank of 8")

    with pytest.raises(ValueError, match="no rank"):
        adapters.loading(lora(folder, 1), fail)
    write_adapter(folder, b"WEIGHTS")
    adapters.loading(lora(folder, 2), lambda: None)
    known = adapters.of(lora(folder, 2))
    assert known is not None and known.shared()


def test_an_adapter_fetched_by_its_load_is_known_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM downloads an adapter from the hub when it loads it."""
    folder = tmp_path / "snapshot"
    monkeypatch.setattr(adapters_module, "model_folder", lambda name, *_: folder if folder.exists() else None)
    adapters = Adapters(now_ns=after_a_while)
    hub = lora(Path("org/adapter"))
    adapters.loading(hub, lambda: write_adapter(folder))
    known = adapters.of(hub)
    assert known is not None and known.shared() and known.digest == digest(lora(folder))
    other = Adapters(now_ns=after_a_while)
    shutil.rmtree(folder)
    unknown = other.of(hub)
    write_adapter(folder)
    assert unknown is not None and not unknown.shared(), "which commit vLLM then loaded is not known"


# Rules


def withdrawn_by(adapters: Adapters, *requests: Any) -> list[bool]:
    """Whether each request's adapter takes part, after all have come."""
    known = [adapters.of(each) for each in requests]
    return [each is not None and each.shared() for each in known]


def test_one_number_for_two_adapters_is_nobodys(tmp_path: Path) -> None:
    """vLLM looks at the number alone: the second one's requests run with the first one's weights."""
    one, two = (write_adapter(tmp_path / name, name.encode()) for name in ("one", "two"))
    adapters = Adapters(now_ns=after_a_while)
    assert withdrawn_by(adapters, lora(one, 1, "a"), lora(two, 1, "b")) == [False, False]


def test_one_name_for_two_contents_is_nobodys_where_vllm_hashes_names_only(tmp_path: Path) -> None:
    """vLLM's own prefix cache then gives the second one blocks of the first; they would be saved as the second's."""
    one, two = (write_adapter(tmp_path / name, name.encode()) for name in ("one", "two"))
    pair = lora(one, 1), lora(two, 2)
    assert withdrawn_by(Adapters(now_ns=after_a_while), *pair) == [False, False]
    assert withdrawn_by(Adapters(path_is_hashed=True, now_ns=after_a_while), *pair) == [True, True]
    same = shutil.copytree(one, tmp_path / "same")
    assert withdrawn_by(Adapters(now_ns=after_a_while), lora(one, 1), lora(same, 2)) == [True, True]


@pytest.mark.parametrize("more", [{"load_inplace": True}, {"tensorizer_config_dict": {"uri": "s3://a"}}])
def test_what_was_loaded_in_place_or_from_elsewhere_is_nobodys(more: dict[str, Any], tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    assert withdrawn_by(Adapters(now_ns=after_a_while), lora(folder, **more)) == [False]
    adapters = Adapters(now_ns=after_a_while)
    assert withdrawn_by(adapters, lora(folder)) == [True]
    if "load_inplace" in more:
        assert withdrawn_by(adapters, lora(folder, **more), lora(folder)) == [False, False]


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        lambda folder: (folder / "adapter_config.json").unlink(),
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        lambda folder: os.utime(folder / "adapter_model.safetensors"),
        lambda folder: (
            (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
            safetensors(folder / "adapter_model.safetensors", {"a": b""}),
        ),
        shutil.rmtree,
    ],
)
def test_any_change_of_an_adapters_files_withdraws_it_for_good(
    harm: Callable[[Path], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_adapter(tmp_path / "adapter")
    kept = shutil.copytree(folder, tmp_path / "kept")
    adapter = Adapters(now_ns=after_a_while).of(lora(folder))
    assert adapter is not None and adapter.shared()
    harm(folder)
    with caplog.at_level(logging.WARNING, "vllm.kvlane"):
        assert not adapter.shared()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, folder)
        assert not adapter.shared()
    warnings = [each.getMessage() for each in caplog.records]
    assert len(warnings) == 1 and "'tuned'" in warnings[0] and "new name" in warnings[0]


def test_a_file_beside_the_adapter_may_change(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    adapter = Adapters(now_ns=after_a_while).of(lora(folder))
    (folder / "README.md").write_text("changed")
    assert adapter is not None and adapter.shared()


def test_an_adapter_without_files_is_nobodys(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", write_adapter(tmp_path / "broken")):
        (path / "adapter_config.json").unlink(missing_ok=True)
        assert withdrawn_by(Adapters(now_ns=after_a_while), lora(path)) == [False]


def test_a_file_that_was_just_written_is_shared_when_it_has_kept_still(tmp_path: Path) -> None:
    """Within a step of the file system's clock it can be written twice with the same times."""
    folder = write_adapter(tmp_path / "adapter")
    now = [time.time_ns()]
    adapter = Adapters(now_ns=lambda: now[0]).of(lora(folder))
    assert adapter is not None and not adapter.shared()
    now[0] += 3 * SECOND
    assert adapter.shared()


def test_a_file_written_twice_within_a_step_of_the_clock_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "adapter")
    now = [time.time_ns()]
    monkeypatch.setattr(adapters_module, "signature_of", lambda files: ((1, 2, 3, now[0], now[0]),))
    monkeypatch.setattr(adapters_module, "YOUNG_NS", 1)
    clock = [now[0]]
    adapter = Adapters(now_ns=lambda: clock[0]).of(lora(folder))
    write_adapter(folder, b"WEIGHTS")
    clock[0] += 2
    assert adapter is not None and not adapter.shared()


def test_where_loads_are_not_seen_only_files_older_than_the_engine_are_known(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    written = max(each.stat().st_ctime_ns for each in folder.iterdir())
    now = [written + SECOND]
    for after, shared in ((SECOND, False), (3 * SECOND, True)):
        now[0] = written + after
        adapters = Adapters(now_ns=lambda: now[0])
        adapters.loads_are_seen = False
        now[0] += 10 * SECOND
        assert withdrawn_by(adapters, lora(folder)) == [shared]


def test_the_number_of_adapters_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters_module, "MAX_ADAPTERS", 2)
    folders = [write_adapter(tmp_path / str(n), str(n).encode()) for n in range(3)]
    adapters = Adapters(now_ns=after_a_while)
    requests = [lora(folder, n + 1, str(n)) for n, folder in enumerate(folders)]
    assert withdrawn_by(adapters, *requests) == [True, True, False]
    assert withdrawn_by(adapters, *requests) == [True, True, False]


def test_an_adapter_withdrawn_while_its_request_waits_gives_its_lease_back(tmp_path: Path) -> None:
    store = FakeCore()
    folder = write_adapter(tmp_path / "adapter")
    engine = Engine(store)
    run(engine, "cold", lora(folder))
    waiting = request("waiting", lora(folder))
    engine.scheduler.add_request(waiting)
    assert engine.scheduler.matched_tokens(waiting, 0) == (20, True)
    assert store.leases
    write_adapter(folder, b"WEIGHTS")
    engine.now += 2 * CHECK_SECONDS
    assert engine.scheduler.matched_tokens(waiting, 0) == (0, False)
    assert not store.leases


def test_an_adapters_files_are_looked_at_once_a_step_however_many_requests_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were looked at for each waiting request in each step: 300 of them on hub adapters took 30 ms a step."""
    looks = []
    signature_of = adapters_module.signature_of

    def counting(files: list[Path]) -> Any:
        looks.append(files)
        return signature_of(files)

    engine = Engine(FakeCore())
    adapter = lora(write_adapter(tmp_path / "adapter"))
    waiting = [request(str(n), adapter) for n in range(30)]
    engine.scheduler.add_request(waiting[0])
    monkeypatch.setattr(adapters_module, "signature_of", counting)
    for _ in range(3):
        looks.clear()
        for each in waiting:
            engine.scheduler.matched_tokens(each, 0)
        assert len(looks) <= 1
        engine.step()
    engine.scheduler.matched_tokens(waiting[0], 0)
    looks.clear()
    engine.now += 1
    engine.scheduler.matched_tokens(waiting[0], 0)
    assert len(looks) == 1, "an engine that stood still looks again"
