"""What a model is, with what vLLM and the hub's library really give; no engine is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weights import safetensors

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
