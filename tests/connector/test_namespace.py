"""The namespace changes with everything that decides what a block's bytes mean, and with nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields, make_dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import full_group, window_group
from weights import safetensors

from kvlane.connector import engine_start
from kvlane.connector.config_fields import COUNTED, ENTERED, LEFT_OUT, WHEN
from kvlane.connector.config_identity import CONDITIONS, as_json
from kvlane.connector.groups import Unsupported
from kvlane.connector.namespace import (
    adapters_meaning,
    crosses_hosts,
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


@dataclass
class ModelConfig:
    """The part of vLLM's class of this name that the namespace looks at; so are the next ones."""

    model: str
    revision: str | None = None
    code_revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "torch.bfloat16"
    quantization: str | None = None
    hf_overrides: Any = field(default_factory=dict)
    seed: int = 0
    max_model_len: int = 1024
    hf_config: Any = None
    override_generation_config: dict[str, Any] = field(default_factory=dict)

    def try_get_generation_config(self) -> dict[str, Any]:
        return {}


@dataclass
class CacheConfig:
    cache_dtype: str = "auto"
    prefix_caching_hash_algo: str = "sha256"
    calculate_kv_scales: bool = False
    mamba_ssm_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9


@dataclass
class LoadConfig:
    load_format: str = "auto"
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class AttentionConfig:
    backend: str | None = None
    indexer_kv_dtype: str = "bf16"


@dataclass
class SpeculativeConfig:
    method: str | None = None
    draft_model_config: Any = None
    num_speculative_tokens: int = 2


@dataclass
class VllmConfig:
    model_config: ModelConfig
    cache_config: CacheConfig
    load_config: LoadConfig
    attention_config: AttentionConfig
    kv_transfer_config: Any
    speculative_config: Any = None
    additional_config: dict[str, Any] = field(default_factory=dict)
    instance_id: str = ""


PARTS = {
    "cache_config": CacheConfig,
    "load_config": LoadConfig,
    "attention_config": AttentionConfig,
}


def config(model: str = "org/model", **changes: Any) -> Any:
    """A configuration whose changes may be of any part."""
    changes.setdefault("hf_config", HubConfig(hidden_size=64, _name_or_path=model, transformers_version="5"))
    taken = {"engine_id": changes.pop("engine_id", "e")}
    parts: dict[str, Any] = {}
    for name, kind in {"model_config": ModelConfig, **PARTS}.items():
        names = {each.name for each in fields(kind)} & changes.keys()
        values = {each: changes.pop(each) for each in names}
        parts[name] = kind(model, **values) if kind is ModelConfig else kind(**values)
    return VllmConfig(**parts, kv_transfer_config=SimpleNamespace(**taken), **changes)


def namespace(vllm_config: Any, group: Any = None, salt: str = "", seed: bytes | None = b"seed") -> bytes:
    group = group or full_group()
    return group_namespace(group, engine_meaning(vllm_config, [group], salt, seed))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "org/other"},
        {"revision": "v2"},
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_theta": 5.0}},
        {"hf_config": HubConfig(hidden_size=128)},
        {"hf_config": HubConfig(hidden_size=64, commit="abc")},
        {"cache_dtype": "fp8"},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"load_format": "dummy"},
        {"calculate_kv_scales": True},
        {"speculative_config": SpeculativeConfig("eagle", config("org/draft").model_config)},
        {"trust_remote_code": True, "code_revision": "v2"},
        {"load_format": "a plugin's", "model_loader_extra_config": {"from": "elsewhere"}},
        {"additional_config": {"platform": 1}},
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
    ours, other = (namespace(config(calculate_kv_scales=True, engine_id=each)) for each in ("e", "f"))
    assert ours != other


@pytest.mark.parametrize(
    "given, rewritten, group",
    [
        ("auto", "fp8_ds_mla", {"kind": "mla_attention", "format": "fp8_ds_mla"}),
        ("fp8", "fp8_ds_mla", {"kind": "mla_attention", "format": "fp8_ds_mla"}),
        ("fp8", "nvfp4_ds_mla", {"kind": "sliding_window_mla", "format": "nvfp4_ds_mla"}),
        # The first layer of the group is an indexer's, which has no format.
        ("fp8", "fp8_ds_mla", {"kind": "mla_attention"}),
        ("auto", "fp8", {"quantized": True}),
    ],
)
def test_a_cache_dtype_that_a_workers_layers_rewrite_leaves_the_namespace(
    given: str, rewritten: str, group: dict[str, Any]
) -> None:
    """Attention layers write the format that they chose into their worker's copy of the configuration. The scheduler's
    copy keeps what the user gave, so the two had different namespaces and the daemon refused the engine."""
    one = replace(full_group(), **group)
    worker = config(cache_dtype=given)
    scheduler = namespace(config(cache_dtype=given), one)
    worker.cache_config.cache_dtype = rewritten
    assert namespace(worker, one) == scheduler


def test_formats_of_the_kv_cache_are_told_apart() -> None:
    latent = replace(full_group(), kind="mla_attention")
    formats = ["fp8_ds_mla", "nvfp4_ds_mla", "auto"]
    assert len({namespace(config(), replace(latent, format=each)) for each in formats}) == 3
    values = ["auto", "fp8", "fp8_e5m2", "int8_per_token_head"]
    assert len({namespace(config(cache_dtype=each)) for each in values}) == 4
    assert namespace(config(), replace(full_group(), quantized=True)) != namespace(config())


def test_a_drafter_in_its_own_group_leaves_the_others_shared() -> None:
    drafted = config(speculative_config=SpeculativeConfig("eagle"))
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


# Longer than a step of the file system's clock.
STEP_NS = 50_000_000


def later(path: Path) -> str:
    """vLLM's name for an engine that is started when a folder's files have long been there."""
    return str(max(each.lstat().st_ctime_ns for each in (path, *path.rglob("*"))) + 2 * STEP_NS)


def v2_by_link(link: Path) -> None:
    flipped = link.parent / "flipped"
    flipped.symlink_to(link.parent / "v2")
    flipped.rename(link)


@pytest.mark.parametrize(
    "change",
    [
        v2_by_link,
        lambda link: safetensors(link.parent / "v1" / "model.safetensors", {"a": b"WEIGHTS"}),
        lambda link: (link.parent / "v2" / "model.safetensors").rename(
            link.parent / "v1" / "model.safetensors"
        ),
        lambda link: (
            (link.parent / "v1").rename(link.parent / "v0"),
            (link.parent / "v2").rename(link.parent / "v1"),
        ),
        lambda link: (link / "config.json").write_text('{"hidden_size": 65}'),
    ],
)
def test_a_model_changed_while_vllm_loads_it_gives_its_blocks_to_nobody(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads weights first and compiles for minutes; only then kvlane looks at the files. A deployer flipped
    /models/current in between: blocks of the old weights got the new ones' name, and the next engine, which loaded the
    new ones, answered with them."""
    monkeypatch.setattr(engine_start, "YOUNG_NS", STEP_NS)
    local_model(tmp_path / "v1")
    local_model(tmp_path / "v2", b"WEIGHTS")
    link = tmp_path / "current"
    link.symlink_to(tmp_path / "v1")
    # Files and links are as old as this test; the engine is started later, and later still they change.
    began = int(later(tmp_path))
    running = config(str(link), instance_id=str(began))
    calm = namespace(running)
    assert calm == namespace(config(str(tmp_path / "v1"), instance_id=str(began)))
    while time.time_ns() < began:
        time.sleep(0.01)
    change(link)
    private = namespace(running)
    assert private == namespace(config(str(link), instance_id=str(began))), "scheduler and workers agree"
    after = namespace(config(str(link), instance_id=later(tmp_path)))
    assert len({private, calm, after}) == 3
    assert private != namespace(config(str(link), instance_id=str(began), engine_id="other"))


def test_weights_that_come_from_other_engines_are_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM tells the workers of an engine that joins others that their weights are dummy ones, and the scheduler not
    always: two namespaces, or else the one of all dummy weights."""
    monkeypatch.setenv("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", "1")
    model = str(local_model(tmp_path / "model"))
    scheduler = namespace(config(model))
    assert scheduler == namespace(config(model, load_format="dummy"))
    assert scheduler != namespace(config(model, engine_id="other"))


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


def test_engines_share_across_hosts_what_means_the_same_there(tmp_path: Path) -> None:
    def of(model: str, drafter: str | None = None, salt: str = "", seed: bytes | None = b"") -> bool:
        speculative = SpeculativeConfig("eagle", config(drafter).model_config) if drafter else None
        meant = config(model, speculative_config=speculative)
        return crosses_hosts(engine_meaning(meant, [full_group()], salt, seed))

    files = str(local_model(tmp_path / "model"))
    assert of(files) and of(files, files)
    # A name may mean other weights on another host, unless the user says that it does not.
    assert not of("s3://bucket/model")
    assert of("s3://bucket/model", salt="ours")
    assert not of(files, "s3://bucket/drafter")
    # No other engine has this one's seed.
    assert not of(files, salt="ours", seed=None)


# Fields of the configuration


@pytest.mark.parametrize(
    "change",
    [
        {"gpu_memory_utilization": 0.5},
        {"max_model_len": 4096},
        {"backend": "FLASHINFER"},
        {"seed": 7},
        {"mamba_ssm_cache_dtype": "float32"},
        {"indexer_kv_dtype": "auto"},
        {"model_loader_extra_config": {"enable_multithread_load": True}},
    ],
)
def test_what_changes_no_bytes_leaves_the_namespace(change: dict[str, Any]) -> None:
    assert namespace(config(**change)) == namespace(config())


def test_a_speculating_engine_may_guess_more_tokens() -> None:
    two, five = (config(speculative_config=SpeculativeConfig("eagle", None, n)) for n in (2, 5))
    assert namespace(two) == namespace(five) != namespace(config())


def rope(kind: str, length: int, **more: Any) -> bytes:
    values = {"rope_parameters": {"rope_type": kind, "factor": 4.0} | more}
    return namespace(config(hf_config=HubConfig(**values), max_model_len=length))


def test_a_longer_longest_request_of_a_longrope_model_is_another_model() -> None:
    """Models like Phi-3 have two sets of rotary factors. vLLM takes one for all requests, by --max-model-len: two
    engines that differ in it shared blocks, and answered wrongly."""
    trained = {"original_max_position_embeddings": 4096}
    assert rope("longrope", 4096, **trained) != rope("longrope", 4097, **trained)
    assert rope("longrope", 1024, **trained) == rope("longrope", 4096, **trained)
    assert rope("longrope", 8192, **trained) == rope("longrope", 131072, **trained)
    # Before transformers 5 the length stands beside the factors.
    old = HubConfig(rope_scaling={"type": "longrope"}, original_max_position_embeddings=4096)
    short, long = (config(hf_config=old, max_model_len=length) for length in (4096, 8192))
    assert namespace(short) != namespace(long)
    inside = HubConfig(
        text_config={"rope_parameters": {"full": {"rope_type": "longrope"} | trained, "other": None}}
    )
    short, long = (config(hf_config=inside, max_model_len=length) for length in (4096, 8192))
    assert namespace(short) != namespace(long)


def test_the_longest_request_of_a_plain_rope_does_not_count_and_of_an_unknown_one_does() -> None:
    for kind in ("default", "llama3", "linear", "yarn"):
        assert rope(kind, 4096) == rope(kind, 8192)
    for kind in ("dynamic", "a new one", "longrope"):
        assert rope(kind, 4096) != rope(kind, 8192)


def test_llama_4_tunes_attention_by_the_longest_request() -> None:
    values = HubConfig(architectures=["Llama4ForConditionalGeneration"], model_type="llama4")

    def of(length: int, **override: bool) -> bytes:
        return namespace(config(hf_config=values, max_model_len=length, override_generation_config=override))

    assert of(8192) == of(32768) != of(32769) == of(131072)
    assert of(8192) != of(8192, attn_temperature_tuning=True) == of(131072)


def test_what_an_indexer_or_a_state_space_needs_counts_only_for_them() -> None:
    indexed = HubConfig(text_config={"index_topk": 2048})
    assert namespace(config(hf_config=indexed)) != namespace(
        config(hf_config=indexed, indexer_kv_dtype="fp8")
    )
    states = replace(window_group(0, 1), kind="mamba")
    assert namespace(config(), states) != namespace(config(mamba_ssm_cache_dtype="float32"), states)


def test_a_field_that_a_later_version_adds_counts_unless_at_its_default() -> None:
    later = make_dataclass("CacheConfig", [("round_keys", bool, False)], bases=(CacheConfig,))
    base = config()
    assert namespace(replace(base, cache_config=later())) == namespace(base)
    assert namespace(replace(base, cache_config=later(round_keys=True))) != namespace(base)


def test_a_default_that_a_later_version_changes_counts() -> None:
    """Left at their defaults both, the two versions would share blocks that mean different things."""
    later = make_dataclass("CacheConfig", [("cache_dtype", str, "fp8")], bases=(CacheConfig,))
    assert namespace(replace(config(), cache_config=later())) != namespace(config())


class Kind(Enum):
    ONE = 1


def of_vllm(value: Any) -> Any:
    return value


class OfVllm:
    pass


of_vllm.__module__ = OfVllm.__module__ = "vllm.a"
of_vllm.__qualname__, OfVllm.__qualname__ = "function", "Class"


class Override:
    """A callable object: its class is not what it does."""

    def __init__(self, theta: float) -> None:
        self._theta = theta

    def __call__(self, values: Any) -> Any:
        return values | {"rope_theta": self._theta}


@pytest.mark.parametrize(
    "overrides",
    [
        (lambda values: values, lambda values: values | {"rope_theta": 5.0}),
        (Override(1.0), Override(5.0)),
        (partial(Override(1.0)), partial(Override(5.0))),
        ({"text_config": Override(1.0)}, {"text_config": Override(5.0)}),
    ],
)
def test_a_function_that_overrides_the_configuration_counts_by_what_came_of_it(
    overrides: Any, tmp_path: Path
) -> None:
    """Two functions of one name, as all lambdas have, gave one namespace: engines with another RoPE loaded each
    other's keys and answered wrongly."""
    model = str(local_model(tmp_path / "model"))

    def of(override: Any, theta: float) -> bytes:
        resulting = HubConfig(hidden_size=64, rope_theta=theta)
        return namespace(config(model, hf_overrides=override, hf_config=resulting))

    assert of(overrides[0], 1.0) != of(overrides[1], 5.0)
    assert of(overrides[0], 1.0) == of(overrides[1], 1.0)


@pytest.mark.parametrize("value", [lambda: 1, Override(1.0), object(), Override])
def test_a_function_elsewhere_is_shared_with_nobody(value: Any) -> None:
    """Its name is all that could be compared, and two may have one name."""
    ours, same, other = (
        namespace(config(additional_config={"hook": value}, engine_id=each)) for each in ("e", "e", "f")
    )
    assert ours == same != other


def test_values_are_the_same_json_in_every_process() -> None:
    values = {
        "set": {"b", "a"},
        "enum": Kind.ONE,
        "path": Path("/a"),
        "bytes": b"a",
        "function": of_vllm,
        "class": OfVllm,
        "partial": partial(of_vllm, value=1),
        "dataclass": LoadConfig(),
        "tuple": (1, None, 2.5),
    }
    text = json.dumps(as_json(values))
    assert "0x" not in text
    assert json.loads(text) == {
        "set": ["a", "b"],
        "enum": "ONE",
        "path": "/a",
        "bytes": "61",
        "function": "vllm.a.function",
        "class": "vllm.a.Class",
        "partial": ["vllm.a.function", [], {"value": 1}],
        "dataclass": {"load_format": "auto", "model_loader_extra_config": {}},
        "tuple": [1, None, 2.5],
    }


def test_adapters_of_engines_that_compute_them_differently_differ() -> None:
    @dataclass
    class LoRAConfig:
        lora_dtype: str = "torch.bfloat16"
        max_loras: int = 1

    def meaning(lora: Any) -> Any:
        return adapters_meaning(SimpleNamespace(lora_config=lora, model_config=None))

    assert meaning(LoRAConfig()) == meaning(LoRAConfig(max_loras=4)) != meaning(LoRAConfig("torch.float16"))
    assert meaning(None) == {}


def test_each_field_has_one_place_and_one_reason() -> None:
    classes = COUNTED.keys() | LEFT_OUT.keys() | ENTERED.keys()
    for kind in classes:
        left_out = [name for _, names in LEFT_OUT.get(kind, []) for name in names.split()]
        everywhere = [*COUNTED.get(kind, {}), *left_out, *ENTERED.get(kind, "").split()]
        assert len(everywhere) == len(set(everywhere)), kind
        assert all(reason.endswith(".") for reason, _ in LEFT_OUT.get(kind, []))
    assert WHEN.keys() == CONDITIONS.keys()
    for name in WHEN:
        kind, member = name.split(".")
        assert member in COUNTED[kind]


def test_the_page_on_identity_has_the_lists_of_the_code() -> None:
    """Made by `python scripts/identity_table.py docs/reference/identity-fields.md`."""
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        str(root / "scripts" / "identity_table.py"),
        str(root / "docs" / "reference" / "identity-fields.md"),
    ]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
