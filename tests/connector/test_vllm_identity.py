"""What a model is, with what vLLM and the hub's library really give; no engine is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import after_a_while
from test_adapters import write_adapter
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore
from weights import safetensors

from kvlane.connector import adapters as adapters_module
from kvlane.connector import capabilities
from kvlane.connector.adapters import Adapters, watch_loads
from kvlane.connector.model_identity import model_identity

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


def identity(name: str, cache: Path, revision: str | None = None, commit: str | None = COMMIT) -> Any:
    model = SimpleNamespace(
        model=name,
        revision=revision,
        dtype="bfloat16",
        quantization=None,
        hf_config=SimpleNamespace(_commit_hash=commit, to_dict=dict),
    )
    return model_identity(model, SimpleNamespace(load_format="auto", download_dir=str(cache)))


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
    monkeypatch.setattr(
        adapters_module, "model_folder", lambda name, revision, _: resolve(name, revision, str(cache))
    )
    snapshot = hub_copy(cache, COMMIT, b"unused")
    write_adapter(snapshot)
    adapters = Adapters(now_ns=after_a_while)
    adapter = adapters.of(LoRARequest("tuned", 1, "org/tiny"))
    local = adapters.of(LoRARequest("local", 2, str(snapshot)))
    assert adapter is not None and adapter.shared() and local is not None and local.shared()
    assert adapter.digest == local.digest
    write_adapter(hub_copy(cache, "f" * 40, b"unused"))
    assert not adapter.shared() and local.shared()
