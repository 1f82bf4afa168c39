"""The namespace changes with everything that decides what a block's bytes mean, and with nothing else."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import full_group, window_group
from weights import safetensors

from kvlane.connector.groups import Unsupported
from kvlane.connector.namespace import (
    engine_meaning,
    group_namespace,
)


class HubConfig:
    """A transformers configuration."""

    def __init__(self, **values: Any) -> None:
        self._values = values
        self._commit_hash = values.pop("commit", None)

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)


def config(model: str = "org/model", **changes: Any) -> Any:
    values: dict[str, Any] = {
        "revision": None,
        "code_revision": None,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "hf_overrides": {},
        "seed": 0,
        "hf_config": HubConfig(hidden_size=64, _name_or_path=model, transformers_version="5"),
        "cache_dtype": "auto",
        "hash": "sha256",
        "scales": False,
        "engine_id": "e",
        "load_format": "auto",
        "speculative": None,
    } | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            **{
                name: values[name]
                for name in ("revision", "code_revision", "dtype", "quantization", "hf_overrides", "seed")
            },
            hf_config=values["hf_config"],
        ),
        cache_config=SimpleNamespace(
            cache_dtype=values["cache_dtype"],
            prefix_caching_hash_algo=values["hash"],
            calculate_kv_scales=values["scales"],
        ),
        load_config=SimpleNamespace(load_format=values["load_format"]),
        kv_transfer_config=SimpleNamespace(engine_id=values["engine_id"]),
        speculative_config=values["speculative"],
    )


def namespace(vllm_config: Any, group: Any = None, salt: str = "", seed: bytes | None = b"seed") -> bytes:
    group = group or full_group()
    return group_namespace(group, engine_meaning(vllm_config, [group], salt, seed))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "org/other"},
        {"revision": "v2"},
        {"code_revision": "v2"},
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_theta": 5.0}},
        {"hf_config": HubConfig(hidden_size=128)},
        {"hf_config": HubConfig(hidden_size=64, commit="abc")},
        {"cache_dtype": "fp8"},
        {"hash": "sha256_cbor"},
        {"load_format": "dummy"},
        {"scales": True},
        {"speculative": SimpleNamespace(method="eagle", draft_model_config=config("org/draft").model_config)},
    ],
)
def test_what_changes_the_bytes_changes_the_namespace(change: dict[str, Any]) -> None:
    assert len(namespace(config())) == 16
    assert namespace(config()) == namespace(config())
    assert namespace(config(**change)) != namespace(config())


def test_salt_seed_and_group_are_in_it() -> None:
    all_different = [
        namespace(config()),
        namespace(config(), salt="tenant"),
        namespace(config(), seed=b"other"),
        namespace(config(), seed=None),
        namespace(config(), full_group(tokens_per_block=8)),
        namespace(config(), window_group(0, 2)),
        namespace(config(), window_group(0, 3)),
        namespace(config(), replace(full_group(), dtype="i8")),
        namespace(config(), replace(full_group(), is_draft=True)),
    ]
    assert len(set(all_different)) == len(all_different)


def test_ranks_and_engines_of_one_model_agree() -> None:
    assert namespace(config(), replace(full_group(), layer_names=("b",))) == namespace(config())
    assert namespace(config(engine_id="other")) == namespace(config())
    read_by_other = HubConfig(hidden_size=64, _name_or_path="elsewhere", transformers_version="6")
    assert namespace(config(hf_config=read_by_other)) == namespace(config())


def test_scales_measured_by_one_engine_are_read_by_no_other() -> None:
    ours, other = (namespace(config(scales=True, engine_id=each)) for each in ("e", "f"))
    assert ours != other


def test_functions_in_the_configuration_are_taken_by_name() -> None:
    def change(value: Any) -> Any:
        return value

    meaning = engine_meaning(config(hf_overrides=change), [full_group()], "", b"")
    assert "0x" not in json.dumps(meaning, default=str)
    assert "change" in json.dumps(meaning, default=str)


def test_a_drafter_in_its_own_group_leaves_the_others_shared() -> None:
    drafted = config(speculative=SimpleNamespace(method="eagle", draft_model_config=None))
    target, draft = full_group(0), replace(full_group(1), is_draft=True)
    with_drafter = engine_meaning(drafted, [target, draft], "", b"")
    own_group_only = engine_meaning(config(), [target, draft], "", b"")
    assert group_namespace(target, with_drafter) == group_namespace(target, own_group_only)
    assert group_namespace(draft, with_drafter) != group_namespace(draft, own_group_only)


def local_model(path: Path, content: bytes = b"weights") -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"hidden_size": 64}')
    safetensors(path / "model.safetensors", {"a": content})
    return path


def test_a_model_copied_to_another_host_is_the_same_model(tmp_path: Path) -> None:
    """Weights were told apart by modification times, so a copy, whose times are its own, found no block."""
    one = local_model(tmp_path / "one")
    copy = tmp_path / "copy"
    shutil.copytree(one, copy)
    os.utime(copy / "model.safetensors", ns=(1, 1))
    (copy / "README.md").write_text("copied")
    assert namespace(config(str(one))) == namespace(config(str(copy)))


def test_weights_written_within_one_timestamp_are_another_model(tmp_path: Path) -> None:
    """Training wrote new weights of the same size, and a tool gave the file its old time: the engine that started
    with them got blocks of the old ones."""
    model = local_model(tmp_path / "model")
    before = namespace(config(str(model)))
    weights = model / "model.safetensors"
    stat = weights.stat()
    safetensors(weights, {"a": b"WEIGHTS"})
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert namespace(config(str(model))) != before


def test_another_configuration_is_another_model(tmp_path: Path) -> None:
    model = local_model(tmp_path / "model")
    before = namespace(config(str(model)))
    (model / "config.json").write_text('{"hidden_size": 65}')
    assert namespace(config(str(model))) != before


def test_dummy_weights_are_told_apart_by_their_seed_and_files_are_not_read(tmp_path: Path) -> None:
    model = local_model(tmp_path / "model")
    before = namespace(config(str(model), load_format="dummy"))
    (model / "model.safetensors").unlink()
    assert namespace(config(str(model), load_format="dummy")) == before
    assert namespace(config(str(model), load_format="dummy", seed=1)) != before


def test_a_folder_without_known_weights_is_not_served(tmp_path: Path) -> None:
    """By its path alone it could be another model on another host."""
    model = local_model(tmp_path / "model")
    (model / "model.safetensors").rename(model / "model.strange")
    with pytest.raises(Unsupported, match="no weight files"):
        namespace(config(str(model)))


def test_weights_that_no_file_here_has_are_known_by_name_revision_and_commit() -> None:
    stored = "s3://bucket/model"
    names = [
        namespace(config(stored)),
        namespace(config("s3://bucket/other")),
        namespace(config(stored, revision="v2")),
        namespace(config(stored, hf_config=HubConfig(hidden_size=64, commit="abc"))),
    ]
    assert len(set(names)) == len(names)
