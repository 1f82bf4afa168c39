"""The part of an engine's configuration that decides what a block's bytes mean, as JSON; `config_fields` lists it."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, cast

from kvlane.connector.config_fields import COUNTED, ENTERED, LEFT_OUT
from kvlane.connector.digest import JsonValue
from kvlane.connector.engine_start import EngineStart
from kvlane.connector.groups import CacheGroup
from kvlane.connector.guard import logger
from kvlane.connector.model_files import PATTERNS
from kvlane.connector.model_identity import config_digest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic.fields import FieldInfo
    from vllm.config import ModelConfig, VllmConfig

# vLLM computes these from the model's own configuration, whatever the longest request is.
PLAIN_ROPES = frozenset(
    {
        "default",
        "linear",
        "llama3",
        "mllama4",
        "mrope",
        "bailing_mrope",
        "openpangu",
        "proportional",
        "yarn",
        "deepseek_yarn",
        "deepseek_llama_scaling",
    }
)
LLAMA4_LONG = 32_768
# Layers of latent attention replace one of these by another in the worker's copy of the configuration. The layout tells
# them apart: the tensors have other types and shapes.
LATENT_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla")


class Unstable(Exception):
    """A value has no form that is equal in every process: a user's function, an object without a representation."""


@dataclass(frozen=True)
class Context:
    """The facts that conditions use."""

    vllm_config: VllmConfig
    model: ModelConfig
    """The ModelConfig in question: the engine's, or the drafter's."""
    groups: Sequence[CacheGroup] = ()
    """The engine's KV cache groups."""

    @property
    def kinds(self) -> frozenset[str]:
        """vLLM's names for the groups' kinds."""
        return frozenset(group.kind for group in self.groups)


def counted_fields(config: DataclassInstance, context: Context) -> dict[str, JsonValue]:
    """The fields of a configuration that count and are not at their default, with what was entered."""
    kind = type(config).__name__
    counted = COUNTED.get(kind, {})
    found: dict[str, JsonValue] = {}
    for field in dataclasses.fields(config):
        name = field.name
        if name in _left_out(kind) or not hasattr(config, name):
            continue
        value = getattr(config, name)
        if name in _entered(kind):
            inner = counted_fields(value, context) if _is_dataclass(value) else None
            if inner:
                found[name] = inner
            continue
        condition = CONDITIONS.get(f"{kind}.{name}")
        if condition is not None:
            trace = condition(context, value)
            if trace is not None:
                found[name] = _value(context, f"{kind}.{name}", trace)
            continue
        default = counted[name] if name in counted else _default(field)
        actual = _value(context, f"{kind}.{name}", value)
        if actual != as_json(default):
            if name not in counted:
                _log_unknown_field(kind, name)
            found[name] = actual
    return found


def _value(context: Context, name: str, value: object) -> JsonValue:
    try:
        return as_json(value)
    except Unstable:
        _log_unstable(name)
        return {"life": EngineStart.of(context.vllm_config).life}


def as_json(value: object) -> JsonValue:
    """A value as JSON that is the same in every process. Raises Unstable."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((as_json(each) for each in value), key=lambda each: json.dumps(each, sort_keys=True))
    if _is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
    name = getattr(value, "__qualname__", None)
    if name is not None:
        # A function or a class. vLLM's have unique names; two of a user's may share one, as lambdas do.
        module = getattr(value, "__module__", None)
        if str(module).partition(".")[0] != "vllm" or "<" in name:
            raise Unstable
        return f"{module}.{name}"
    if isinstance(value, partial):
        return [as_json(value.func), as_json(value.args), as_json(value.keywords)]
    text = repr(value)
    if callable(value) or " at 0x" in text:
        raise Unstable
    return text


def _is_dataclass(value: object) -> TypeGuard[DataclassInstance]:
    """Whether it is an object of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


# Conditions: what counts of a field's value, None if nothing does.


def _overrides(context: Context, overrides: object) -> JsonValue:
    try:
        return as_json(overrides) or None
    except Unstable:
        return {"resulting": config_digest(context.model.hf_config)}


def _longest_request(context: Context, length: int) -> JsonValue:
    values = _model_values(context)
    counts: dict[str, JsonValue] = {}
    long: set[tuple[int, bool]] = set()
    for kind, original in _ropes(values):
        if kind in ("longrope", "su") and isinstance(original, int):
            # vLLM takes the short or the long factors for all requests of an engine.
            long.add((original, length > original))
            counts["long"] = long
        elif kind not in PLAIN_ROPES:
            counts["length"] = length
    if _is_llama4(values):
        generation = dict(context.model.try_get_generation_config())
        generation.update(context.model.override_generation_config)
        counts["tuned"] = bool(generation.get("attn_temperature_tuning", length > LLAMA4_LONG))
    return counts or None


def _model_values(context: Context) -> Mapping[str, object]:
    to_dict = getattr(getattr(context.model, "hf_config", None), "to_dict", None)
    return to_dict() if to_dict is not None else {}


def _ropes(values: Mapping[str, object], outer: object = None) -> Iterator[tuple[str, object]]:
    """The kind of each RoPE in a model's configuration, and the length it was first trained for."""
    original = values.get("original_max_position_embeddings", outer)
    for name, value in values.items():
        if not isinstance(value, Mapping):
            continue
        if name not in ("rope_parameters", "rope_scaling"):
            yield from _ropes(value, original)
            continue
        described = "rope_type" in value or "type" in value
        # Some models have one for each kind of layer.
        for each in [value] if described else value.values():
            if isinstance(each, Mapping):
                kind = str(each.get("rope_type", each.get("type", "default")))
                yield kind, each.get("original_max_position_embeddings", original)


def _is_llama4(values: Mapping[str, object]) -> bool:
    architectures = values.get("architectures")
    known = architectures if isinstance(architectures, list | tuple) else []
    names = [str(values.get("model_type", "")), *map(str, known)]
    return any(name.lower().startswith(("llama4", "eaglellama4")) for name in names)


def _cache_dtype(context: Context, cache_dtype: object) -> JsonValue:
    """Gives the same before and after a worker builds its layers, which rewrite the field in the worker's copy only."""
    groups = [group for group in context.groups if not group.is_draft] or context.groups
    formats = {group.format for group in groups} - {""}
    if formats:
        return sorted(formats)
    if any("mla" in group.kind for group in groups) and cache_dtype in LATENT_DTYPES:
        return None
    if cache_dtype == "auto":
        # `quantized`: the checkpoint says how its cache is quantized.
        return "fp8" if any(group.quantized for group in groups) else None
    return cache_dtype


def _own_scales(context: Context, calculated: object) -> JsonValue:
    return str(context.vllm_config.kv_transfer_config.engine_id) if calculated else None


def _of_states(context: Context, value: object) -> JsonValue:
    return value if "mamba" in context.kinds else None


def _of_indexer(context: Context, value: object) -> JsonValue:
    values = _model_values(context)
    return value if _has_indexer(values) else None


def _has_indexer(values: Mapping[str, object]) -> bool:
    return any(
        str(name).startswith("index_") or (isinstance(value, Mapping) and _has_indexer(value))
        for name, value in values.items()
    )


def _of_other_loaders(context: Context, value: object) -> JsonValue:
    load_format = str(getattr(context.vllm_config.load_config, "load_format", "auto"))
    return value if value and load_format not in ("auto", "dummy", *PATTERNS) else None


CONDITIONS: dict[str, Callable[..., JsonValue]] = {
    "ModelConfig.hf_overrides": _overrides,
    "ModelConfig.max_model_len": _longest_request,
    "CacheConfig.cache_dtype": _cache_dtype,
    "CacheConfig.calculate_kv_scales": _own_scales,
    "CacheConfig.mamba_cache_dtype": _of_states,
    "CacheConfig.mamba_ssm_cache_dtype": _of_states,
    "CacheConfig.mamba_cache_mode": _of_states,
    "AttentionConfig.indexer_kv_dtype": _of_indexer,
    "LoadConfig.model_loader_extra_config": _of_other_loaders,
}


@cache
def _left_out(kind: str) -> frozenset[str]:
    return frozenset(name for _, names in LEFT_OUT.get(kind, []) for name in names.split())


@cache
def _entered(kind: str) -> frozenset[str]:
    return frozenset(ENTERED.get(kind, "").split())


def _default(field: dataclasses.Field[object]) -> object:
    """A dataclass field's default; vLLM writes some in pydantic's way."""
    default = field.default
    if default is dataclasses.MISSING:
        factory = field.default_factory
        return None if factory is dataclasses.MISSING else factory()
    if type(default).__name__ == "FieldInfo":
        return cast("FieldInfo", default).get_default(call_default_factory=True)
    return default


@cache
def _log_unstable(name: str) -> None:
    # Log: a setting's value is an object, so kvlane cannot compare it with other engines' values. Do: write it as
    # numbers and words, or accept that nothing is shared.
    logger.warning(
        "kvlane: %s holds a function or an object that kvlane cannot tell from others, so this engine shares no blocks "
        "with other engines or its own next run; put it down as numbers and words to share them",
        name,
    )


@cache
def _log_unknown_field(kind: str, name: str) -> None:
    # Log: a newer vLLM has a setting that may change what blocks mean. Do: nothing, if engines that share blocks
    # have the same value of it.
    logger.info(
        "kvlane: %s.%s is a setting of this vLLM that kvlane does not know, so engines with another value of it share "
        "no blocks",
        kind,
        name,
    )
