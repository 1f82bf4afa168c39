"""What the connector hands to vLLM, against vLLM's own classes; no engine is started."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import Engine, Request, window_group
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvlane import plugin
from kvlane.connector import KVLaneConnector, capabilities, events
from kvlane.connector.counters import COUNTERS
from kvlane.connector.guard import Failures
from kvlane.connector.jobs import JobEnd, LoadJob, SaveJob
from kvlane.connector.kinds import scheduler_kinds
from kvlane.connector.kinds.kind import SchedulerKind
from kvlane.connector.metadata import KVLaneMetadata, KVLaneWorkerMetadata
from kvlane.connector.namespace import GUESSABLE_HASHES, HASH_SEED_VARIABLE, drawn_hash_seed, fix_hash_seed
from kvlane.connector.stats import KVLaneStats
from kvlane.connector.weights import WeightsReport
from kvlane.connector.worker import WorkerSide
from kvlane.plugin import register
from kvlane.testing import FakeCore

pytestmark = pytest.mark.old_vllm


def test_metadata_crosses_process_borders() -> None:
    metadata = KVLaneMetadata(
        loads=[LoadJob(1, "r", b"b" * 16, [(0, [1, 2], [b"\1\0\0\0\2\0\0\0"])], frozenset({1, 2}))],
        saves=[SaveJob(2, [(0, b"", [b"h" * 32], [3])])],
        idle=True,
    )
    assert pickle.loads(pickle.dumps(metadata)) == metadata


def test_ranks_are_added_up() -> None:
    ranks = [
        KVLaneWorkerMetadata({1: JobEnd(1, True), 2: JobEnd(1, True)}),
        KVLaneWorkerMetadata({1: JobEnd(1, False)}),
        KVLaneWorkerMetadata({3: JobEnd(1, True)}),
    ]
    together = ranks[0].aggregate(ranks[1]).aggregate(ranks[2])
    assert together.ended == {1: JobEnd(2, False), 2: JobEnd(1, True), 3: JobEnd(1, True)}
    assert ranks[0].ended[1] == JobEnd(1, True), "in one process the ranks' objects are still in use"


def test_what_further_kinds_say_goes_by_vllms_messages() -> None:
    """A kind of job that is added to the two lists travels without a change of these messages."""
    jobs = KVLaneMetadata(others={"feed": {"prompts": ["r"]}})
    assert pickle.loads(pickle.dumps(jobs)) == jobs
    heard: list[object] = []

    class Feed(SchedulerKind):
        name = "feed"

        def reported(self, part: object) -> None:
            heard.append(part)

    messages = []
    for rank in range(2):
        connector = object.__new__(KVLaneConnector)
        connector.failures = Failures()
        connector._worker = WorkerSide(rank, connector.failures)
        assert connector.build_connector_worker_meta() is None
        said = WeightsReport(1, frozenset({(rank, "a label")}))
        connector._worker.kinds[0]._shared.reports.others["feed"] = said
        messages.append(pickle.loads(pickle.dumps(connector.build_connector_worker_meta())))
        assert connector.build_connector_worker_meta() is None
    engine = Engine(FakeCore(), scheduler_kinds=lambda shared: [*scheduler_kinds(shared), Feed(shared)])
    connector = object.__new__(KVLaneConnector)
    connector.failures = Failures()
    connector._scheduler = engine.scheduler
    together = messages[0].aggregate(messages[1])
    connector.update_connector_output(cast("Any", SimpleNamespace(kv_connector_worker_meta=together)))
    assert heard == [WeightsReport(1, frozenset({(0, "a label"), (1, "a label")}))]
    assert connector.failures.count == 0


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_the_hash_seed_is_the_one_that_vllm_then_draws(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in (None, "42"):
        monkeypatch.setenv(HASH_SEED_VARIABLE, "to be restored")
        if given is None:
            monkeypatch.delenv(HASH_SEED_VARIABLE)
        else:
            monkeypatch.setenv(HASH_SEED_VARIABLE, given)
        expected = fix_hash_seed(algorithm)
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
        assert drawn_hash_seed() == expected
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
        assert drawn_hash_seed() == expected, "another process would draw another one"


@pytest.mark.parametrize("algorithm", GUESSABLE_HASHES)
def test_a_seed_that_protects_is_left_random(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HASH_SEED_VARIABLE, raising=False)
    assert fix_hash_seed(algorithm) is None


def test_the_plugin_registers_the_connector_once() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KVLaneConnector") is KVLaneConnector
    assert KVConnectorFactory.get_connector_class_by_name("P2pNcclConnector") is KVLaneConnector


def test_a_connector_of_vllms_own_name_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = object()
    monkeypatch.setitem(KVConnectorFactory._registry, "P2pNcclConnector", own)  # pyright: ignore
    monkeypatch.setattr(plugin, "_registered", set[str]())
    caplog.set_level("INFO", logger="vllm.kvlane")
    for _ in range(2):
        register()
    assert KVConnectorFactory._registry["P2pNcclConnector"] is own
    assert [each.getMessage() for each in caplog.records if "P2pNcclConnector" in each.getMessage()] == [
        "kvlane: vLLM has a connector P2pNcclConnector already, which stays as it is"
    ]


def published(block_hash: bytes) -> Any:
    """A hash as vLLM shows it to listeners."""
    return kv_cache_utils.maybe_convert_block_hash(kv_cache_utils.BlockHash(block_hash))


def test_events_name_the_blocks_and_their_tokens() -> None:
    request = Request("r", list(range(20)))
    first, second, third = request.block_hashes[:3]
    event = events.blocks_stored(window_group(1, 2), request, first, [second, third], 1)
    assert event.block_hashes == [published(second), published(third)]
    assert event.parent_block_hash == published(first)
    assert event.token_ids == list(range(4, 12))
    assert (event.block_size, event.medium, event.group_idx) == (4, "CPU", 1)
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("sliding_window", 6)


def test_events_follow_completed_saves_and_resets() -> None:
    store = FakeCore()
    engine = Engine(store, emit_events=True)
    request = Request("r", list(range(20)))
    engine.run(request)
    stored: Any
    (stored,) = engine.scheduler.take_events()
    assert stored.block_hashes == [published(each) for each in request.block_hashes]
    assert stored.parent_block_hash is None
    store.fail_saves = True
    engine.run(Request("failed", list(range(30, 50))))
    assert engine.scheduler.take_events() == []
    # With the same weights everything is still there.
    for label, cleared in (("", []), ("life 2", ["AllBlocksCleared"])):
        engine.weights.present = label
        engine.scheduler.reset()
        asking = Request(f"asking {label}", list(range(20)))
        engine.scheduler.add_request(asking)
        assert engine.scheduler.matched_tokens(asking, 0) == (None, False)
        engine.step()
        engine.scheduler.forget_request(asking.request_id)
        assert [type(each).__name__ for each in engine.scheduler.take_events()] == cleared


def test_what_the_daemon_evicts_is_told_in_vllms_own_events() -> None:
    """As far as this version has fields for it; the hash is the one that was announced."""
    store = FakeCore()
    engine = Engine(store, emit_events=True)
    request = Request("r", list(range(20)))
    engine.run(request)
    engine.finish(request)
    stored: Any
    removed: Any
    again: Any
    (stored,) = engine.scheduler.take_events()
    key = next(key for key in store.blocks if key[2] == request.block_hashes[2])
    store.evict(key)
    engine.step()
    (removed,) = engine.scheduler.take_events()
    assert type(removed).__name__ == "BlockRemoved"
    assert (removed.block_hashes, removed.medium) == ([stored.block_hashes[2]], "CPU")
    assert getattr(removed, "group_idx", 0) == 0
    # It is there again, although no save of it was asked for.
    store.journal.append((key, True))
    engine.step()
    (again,) = engine.scheduler.take_events()
    assert (again.block_hashes, again.parent_block_hash) == (removed.block_hashes, stored.block_hashes[1])
    assert again.token_ids == list(range(8, 12))
    assert {name: getattr(again, name) for name in ("medium", "lora_name", "block_size")} == {
        "medium": "CPU",
        "lora_name": None,
        "block_size": 4,
    }


def test_counters_reach_the_log_and_prometheus() -> None:
    stats = KVLaneStats(data={"hit_tokens": 32, "load_seconds": 0.25})
    assert not stats.is_empty()
    stats.aggregate(KVLaneStats(data={"hit_tokens": 16}))
    rebuilt = KVLaneConnector.build_kv_connector_stats(stats.data)
    assert rebuilt is not None and rebuilt.reduce() == {"hit_tokens": 48, "load_seconds": 0.25}

    registry = CollectorRegistry()

    def counter(**arguments: Any) -> Counter:
        return Counter(**arguments, registry=registry)

    def gauge(**arguments: Any) -> Gauge:
        return Gauge(**arguments, registry=registry)

    metrics = KVLaneConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),  # pyright: ignore
        cast("Any", {Counter: counter, Gauge: gauge, Histogram: Histogram}),
        ["model", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    metrics.observe(stats.data, 1)
    labels = {"model": "m", "engine": "1"}
    assert registry.get_sample_value("vllm:kvlane_hit_tokens_total", labels) == 48
    assert registry.get_sample_value("vllm:kvlane_hit_tokens_total", labels | {"engine": "0"}) == 0
    names = {metric.name for metric in registry.collect()}
    assert names == {f"vllm:kvlane_{name}" for name in COUNTERS} | {"vllm:kvlane_pool_info"}


def test_the_capabilities_are_those_of_one_vllm() -> None:
    if capabilities.reports_failed_requests():
        assert capabilities.reconciles_hybrid_hits()
        source = capabilities.host_hit_source()
        assert source is None or source.value == "host"
        assert not capabilities.empty_transfer_results().failed_recving
    else:
        assert capabilities.host_hit_source() is None
