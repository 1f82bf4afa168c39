"""What a model is, with what vLLM and the hub's library really give; no engine is started."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pickle
import re
import shutil
import time
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine import ENVIRONMENT, wait_until_old
from fakes import after_a_while, full_group
from test_adapters import write_adapter
from tiny_model import HEAD_DIM, build_tiny_model
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.renderers.base import BaseRenderer
from vllm.utils.counter import AtomicCounter
from vllm.v1.engine.core import EngineCore
from weights import safetensors

from kvlane.connector import adapters as adapters_module
from kvlane.connector import capabilities
from kvlane.connector.adapters import Adapters, watch_loads
from kvlane.connector.config_fields import COUNTED, COUNTED_WHOLE, ENTERED, LEFT_OUT, WHEN
from kvlane.connector.config_identity import _default, as_json
from kvlane.connector.engine_start import EngineStart
from kvlane.connector.inputs import has_counted_inputs, names_are_content
from kvlane.connector.model_identity import model_identity
from kvlane.connector.namespace import engine_meaning, group_namespace

pytestmark = pytest.mark.old_vllm

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_copy(cache: Path, commit: str, weights: bytes) -> Path:
    """A model as the hub's library keeps it: named files are links to blobs."""
    model = cache / "models--org--tiny"
    snapshot = model / "snapshots" / commit
    (model / "refs").mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text(commit)
    safetensors(model / "blobs" / commit, {"a": weights})
    (model / "blobs" / "config").write_text('{"hidden_size": 64}')
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / commit)
    (snapshot / "config.json").symlink_to(Path("../../blobs/config"))
    return snapshot


def identity(
    name: str,
    cache: Path,
    revision: str | None = None,
    commit: str | None = COMMIT,
    began_ns: int | None = None,
) -> Any:
    model = SimpleNamespace(
        model=name,
        revision=revision,
        dtype="bfloat16",
        quantization=None,
        hf_config=SimpleNamespace(_commit_hash=commit, to_dict=dict),
    )
    load = SimpleNamespace(load_format="auto", download_dir=str(cache))
    return model_identity(model, load, EngineStart(("engine", ""), began_ns))


def test_a_hub_model_and_a_copy_in_a_folder_are_one_model(tmp_path: Path) -> None:
    """A commit names files; it is not what they hold. A mirror of the model has other commits and the same blocks."""
    cache = tmp_path / "hub"
    snapshot = hub_copy(cache, COMMIT, b"weights")
    by_name = identity("org/tiny", cache)
    assert by_name == identity(str(snapshot), cache)
    assert by_name == identity("org/tiny", cache, revision=COMMIT)
    other_commit = "f" * 40
    hub_copy(cache, other_commit, b"weights")
    assert identity("org/tiny", cache, commit=other_commit) == by_name
    hub_copy(cache, "e" * 40, b"WEIGHTS")
    assert identity("org/tiny", cache) != by_name
    assert identity("org/tiny", cache, revision=COMMIT) == by_name


def test_a_hub_name_that_came_to_mean_another_commit_since_the_start_is_nobodys(tmp_path: Path) -> None:
    """Another process fetched the newest commit while this engine loaded the former one."""
    cache = tmp_path / "hub"
    hub_copy(cache, COMMIT, b"weights")
    known = identity("org/tiny", cache)
    began = time.time_ns()
    assert identity("org/tiny", cache, began_ns=began) == known, "fetched by this start itself"
    hub_copy(cache, "e" * 40, b"WEIGHTS")
    assert "life" in identity("org/tiny", cache, began_ns=began)
    assert identity("org/tiny", cache, revision=COMMIT, began_ns=began) == known
    later = time.time_ns() + 3_000_000_000
    assert "life" not in identity("org/tiny", cache, began_ns=later)


def test_vllm_tells_when_an_engine_was_started() -> None:
    """Its processes learn the same moment by the configuration that they get, before they load weights."""
    before = time.time_ns()
    config: Any = VllmConfig()
    config.kv_transfer_config = KVTransferConfig(kv_connector="KVLaneConnector", kv_role="kv_both")
    start = EngineStart.of(config)
    assert start.began_ns is not None and before <= start.began_ns <= time.time_ns()
    assert EngineStart.of(pickle.loads(pickle.dumps(config))) == start


def test_a_hub_model_that_is_not_on_this_host_is_known_by_name(tmp_path: Path) -> None:
    assert identity("org/absent", tmp_path)["weights"] == {
        "name": "org/absent",
        "revision": "None",
        "commit": COMMIT,
    }


class Executor:
    """An engine core's workers, which load adapters."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def add_lora(self, lora_request: LoRARequest) -> bool:
        self.loaded.append(lora_request.lora_path)
        return True


def test_what_an_engine_core_loads_is_known_from_then_on(tmp_path: Path) -> None:
    """The files change between the load by the server and the first request: nobody shares the adapter."""
    core: Any = EngineCore.__new__(EngineCore)
    core.model_executor = Executor()
    folders = [write_adapter(tmp_path / name, name.encode()) for name in ("kept", "changed")]
    lora = [LoRARequest(folder.name, n + 1, str(folder)) for n, folder in enumerate(folders)]
    engines = [Adapters(now_ns=after_a_while) for _ in range(2)]
    assert all(watch_loads(each) for each in engines)
    assert [core.add_lora(each) for each in lora] == [True, True]
    assert core.model_executor.loaded == [str(each) for each in folders], "each is loaded once"
    write_adapter(folders[1], b"CHANGED")
    for adapters in engines:
        known = [adapters.of(each) for each in lora]
        assert [each is not None and each.shared() for each in known] == [True, False]


def test_whether_vllm_hashes_an_adapters_path_is_found_out() -> None:
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    values: Any = {"mm_features": [], "cache_salt": None, "prompt_embeds": None, "is_resumable": False}
    request: Any = SimpleNamespace(lora_request=LoRARequest("name", 1, "/the/path"), **values)
    keys, _ = generate_block_hash_extra_keys(request, 0, 1, 0)
    assert "name" in str(keys)
    assert capabilities.hashes_adapter_paths() == ("/the/path" in str(keys))


def test_an_adapter_of_the_hub_is_its_local_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its revision is in no request. When the hub has a newer one, vLLM may have either."""
    cache = tmp_path / "hub"
    resolve = adapters_module.model_folder
    resolved = []

    def model_folder(name: str, revision: str | None, _: str | None) -> Path | None:
        resolved.append(name)
        return resolve(name, revision, str(cache))

    monkeypatch.setattr(adapters_module, "model_folder", model_folder)
    snapshot = hub_copy(cache, COMMIT, b"unused")
    write_adapter(snapshot)
    adapters = Adapters(now_ns=after_a_while)
    adapter = adapters.of(LoRARequest("tuned", 1, "org/tiny"))
    local = adapters.of(LoRARequest("local", 2, str(snapshot)))
    assert adapter is not None and adapter.shared() and local is not None and local.shared()
    assert adapter.digest == local.digest
    resolved.clear()
    assert adapter.shared() and not resolved, (
        "only the hub's note of the commit is read; the library takes 0.1 ms"
    )
    write_adapter(hub_copy(cache, "f" * 40, b"unused"))
    assert not adapter.shared() and local.shared()


# Fields of the configuration


def configuration_classes() -> dict[type, list[str]]:
    """Every class of the running vLLM that a VllmConfig may hold, with its fields."""
    found: dict[type, list[str]] = {}

    def walk(kind: Any) -> None:
        for inner in typing.get_args(kind):
            walk(inner)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)) or kind in found:
            return
        found[kind] = [field.name for field in dataclasses.fields(kind)]
        hints = typing.get_type_hints(kind)
        for name in found[kind]:
            walk(hints[name])

    walk(VllmConfig)
    return found


def test_every_field_of_vllms_configuration_has_been_decided_on() -> None:
    """A new field of a new version fails here: somebody has to say whether it can change what KV bytes mean."""
    classes = configuration_classes()
    assert {"ModelConfig", "CacheConfig", "ParallelConfig", "AttentionConfig"} <= {
        each.__name__ for each in classes
    }
    undecided = []
    for kind, members in classes.items():
        name = kind.__name__
        if name in COUNTED_WHOLE:
            continue
        decided = {*COUNTED.get(name, {}), *ENTERED.get(name, "").split()}
        decided.update(each for _, names in LEFT_OUT.get(name, []) for each in names.split())
        undecided += [f"{name}.{each}" for each in members if each not in decided]
    assert not undecided, (
        f"{', '.join(undecided)}: say in kvlane/connector/config_fields.py of each whether it can change what the "
        "bytes of a KV block mean: COUNTED with its default if it can, LEFT_OUT with the reason if it cannot"
    )


def test_the_defaults_that_leave_no_trace_are_those_of_the_running_version() -> None:
    changed = []
    for kind in configuration_classes():
        counted = COUNTED.get(kind.__name__, {})
        for field in dataclasses.fields(kind):
            name = f"{kind.__name__}.{field.name}"
            if field.name not in counted or name in WHEN:
                continue
            if as_json(_default(field)) != as_json(counted[field.name]):
                changed.append(f"{name} is {_default(field)!r}")
    assert not changed, (
        f"the default of this vLLM differs from the one of others: {', '.join(changed)}; say in "
        "kvlane/connector/config_fields.py when the field counts, or engines of these versions share nothing"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = build_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")
    # No engine is started; these bytes are the same on every machine.
    safetensors(path / "model.safetensors", {"model.norm.weight": b"1" * 1024})
    return path


def engine_namespace(path: Path, **arguments: Any) -> str:
    """The namespace of an engine with these arguments, as vLLM resolves them."""
    wait_until_old(path)
    os.environ.update(ENVIRONMENT)
    values: dict[str, Any] = {"model": str(path), "dtype": "float32", "max_model_len": 1024}
    transfer = KVTransferConfig(kv_connector="KVLaneConnector", kv_role="kv_both")
    config = EngineArgs(**values | arguments, kv_transfer_config=transfer).create_engine_config()
    group = full_group()
    return group_namespace(group, engine_meaning(config, [group], "", b"seed")).hex()


# The identity that every version gives the model of tiny_model.py. Changing it makes all stored blocks cold.
TINY_MODEL = "adee35069855fa0f4fb79bf0881ef381"


def test_engines_of_other_versions_share(model: Path) -> None:
    """The same digest is expected of every version that runs this test."""
    assert engine_namespace(model) == TINY_MODEL


def test_what_must_share_does(model: Path) -> None:
    different: list[dict[str, Any]] = [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 4096},
        {"max_model_len": 512},
        {"gpu_memory_utilization": 0.3},
        {"num_gpu_blocks_override": 77},
        {"enforce_eager": True},
        {"compilation_config": {"mode": 0}},
        {"master_addr": "127.0.0.2", "master_port": 4242},
        {"seed": 5},
        {"served_model_name": "another"},
        {"enable_lora": True},
        {"model": str(model) + "/."},
    ]
    for arguments in different:
        assert engine_namespace(model, **arguments) == TINY_MODEL, arguments


def test_what_must_not_share_does_not(model: Path) -> None:
    different: list[dict[str, Any]] = [
        {"dtype": "bfloat16"},
        {"hf_overrides": {"rope_theta": 5.0}},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 5},
        {"additional_config": {"platform": 1}},
    ]
    found = {TINY_MODEL} | {engine_namespace(model, **arguments) for arguments in different}
    assert len(found) == 1 + len(different)


def test_a_longer_longest_request_of_a_phi_3_is_another_model(model: Path, tmp_path: Path) -> None:
    """--max-model-len chooses between the two sets of rotary factors. Engines that differ in it shared blocks and
    answered wrongly."""
    phi = shutil.copytree(model, tmp_path / "phi")
    half = HEAD_DIM // 2
    config = json.loads((phi / "config.json").read_text()) | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "pad_token_id": 0,
        "original_max_position_embeddings": 256,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * half, "long_factor": [4.0] * half},
    }
    (phi / "config.json").write_text(json.dumps(config))
    lengths = {length: engine_namespace(phi, max_model_len=length) for length in (128, 256, 512, 1024)}
    assert lengths[128] == lengths[256] != lengths[512] == lengths[1024]


@pytest.mark.parametrize("gigabytes", [0, 4])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_what_vllm_names_by_a_counter_is_known_as_such(gigabytes: float, prefix_caching: bool) -> None:
    """Asks vLLM's own renderer; a version that counts in another way fails here."""
    source = inspect.getsource(BaseRenderer)
    (written,) = re.findall(r'mm_req_id = (f"renderer.*")', source)
    multimodal = SimpleNamespace(mm_processor_cache_gb=gigabytes)
    model = SimpleNamespace(multimodal_config=multimodal)
    cache = SimpleNamespace(enable_prefix_caching=prefix_caching)
    renderer: Any = SimpleNamespace(
        model_config=model,
        config=SimpleNamespace(cache_config=cache, model_config=model),
        _validate_mm_uuids=lambda *_: None,
        api_process_rank=3,
        _mm_req_counter=AtomicCounter(),
    )
    items: Any = SimpleNamespace(get_all_counts=lambda: {"image": 2})
    name = eval(written, {"self": renderer})
    named = BaseRenderer._process_mm_uuids(renderer, {"image": [None, None]}, items, {}, name)
    given = [each for each in named.get("image", []) if each is not None]
    content = names_are_content(renderer.config)
    assert bool(given) != content, "vLLM counts in other cases than kvlane thinks"
    for each in given:
        request = SimpleNamespace(mm_features=[SimpleNamespace(identifier=each)])
        assert has_counted_inputs(request, names_are_content=True)
