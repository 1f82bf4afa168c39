"""The meaning of a block's bytes, as 16 bytes: engines share blocks of equal namespace and equal hash, and no others.

Not in it: how the bytes are cut (parallel shape, layers of a rank, order of dimensions); that is the layout's digest.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from kvlane.connector.config_identity import Context, counted_fields
from kvlane.connector.digest import JsonValue, digest16
from kvlane.connector.engine_start import EngineStart
from kvlane.connector.groups import CacheGroup
from kvlane.connector.model_identity import model_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HASH_SEED_VARIABLE = "PYTHONHASHSEED"
# A client that guesses the seed of these can build colliding prompts, so they need a random seed.
GUESSABLE_HASHES = ("xxhash", "xxhash_cbor")


def group_namespace(group: CacheGroup, engine: dict[str, JsonValue]) -> bytes:
    """16 bytes for one KV cache group of an engine; `engine` is from `engine_meaning`."""
    described: dict[str, JsonValue] = {
        "kind": group.kind,
        "window": group.window,
        "tokens_per_block": group.tokens_per_block,
        "dtype": group.dtype,
        "draft": group.is_draft,
    }
    if group.format:
        described["format"] = group.format
    meaning: dict[str, JsonValue] = {
        "version": 2,
        "engine": {name: value for name, value in engine.items() if name != "draft"},
        "group": described,
    }
    # Where vLLM does not say which group the drafter is in, all may hold its layers.
    if group.is_draft or not engine["draft_has_own_group"]:
        meaning["draft"] = engine["draft"]
    return digest16(meaning)


def engine_meaning(
    vllm_config: VllmConfig, groups: list[CacheGroup], salt: str, hash_seed: bytes | None
) -> dict[str, JsonValue]:
    """All that decides what the bytes of a block mean, as JSON; the same in scheduler and workers.

    `hash_seed` is from `fix_hash_seed`, `salt` the user's own word.
    """
    return {
        "salt": salt,
        "model": model_identity(
            vllm_config.model_config, vllm_config.load_config, EngineStart.of(vllm_config)
        ),
        "settings": counted_fields(vllm_config, Context(vllm_config, vllm_config.model_config, groups)),
        "hash": str(vllm_config.cache_config.prefix_caching_hash_algo),
        "hash_seed": hash_seed.hex() if hash_seed is not None else "random",
        "draft": draft_identity(vllm_config, groups),
        "draft_has_own_group": any(group.is_draft for group in groups),
    }


def crosses_hosts(meaning: dict[str, JsonValue]) -> bool:
    """Whether engines of other hosts may share the blocks. `meaning` is from `engine_meaning`.

    Not if the weights of the model or of its drafter are known by a name only, which may mean other weights on another
    host: then the user's own word has to say that it does not. And not if no other engine can have the namespace."""
    draft = meaning["draft"]
    models = [meaning["model"], draft.get("model") if isinstance(draft, dict) else None]
    models = [model for model in models if isinstance(model, dict)]
    if meaning["hash_seed"] == "random" or any("life" in model for model in models):
        return False
    weights = [model.get("weights") for model in models]
    by_name = any(isinstance(each, dict) and "name" in each for each in weights)
    return bool(meaning["salt"]) or not by_name


def draft_identity(vllm_config: VllmConfig, groups: list[CacheGroup]) -> dict[str, JsonValue] | None:
    """The drafter's identity; None without speculative decoding. `groups` are the engine's."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    draft = speculative.draft_model_config
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    context = Context(vllm_config, draft, groups)
    return {
        "settings": counted_fields(speculative, context),
        "model": model_identity(draft, load, EngineStart.of(vllm_config)) if draft is not None else None,
        "model_settings": counted_fields(draft, context) if draft is not None else None,
    }


def adapters_meaning(vllm_config: VllmConfig) -> dict[str, JsonValue]:
    """The part of the configuration that decides what an adapter does."""
    lora = vllm_config.lora_config
    return {} if lora is None else counted_fields(lora, Context(vllm_config, vllm_config.model_config))


def keyed_hash(block_hash: bytes, key: bytes) -> bytes:
    """The hash under which a block is stored that depends on more than its namespace: vLLM's own, mixed with the
    identity of an adapter, of changed weights, or of both.

    vLLM's own holds only the adapter's name or path, and two engines may mean different files by it."""
    return hashlib.blake2b(block_hash, key=key, digest_size=16).digest()


def fix_hash_seed(algorithm: str) -> bytes | None:
    """The hash that vLLM starts every prompt's chain with, made reproducible where vLLM would draw it at random.

    To be called before the engine core draws it; vLLM builds connectors first. None: it stays random.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    seed = os.environ.get(HASH_SEED_VARIABLE)
    if seed is None:
        if algorithm in GUESSABLE_HASHES:
            return None
        seed = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    if seed is None:
        # vLLM up to 0.28 reads this variable when it draws the seed.
        seed = os.environ[HASH_SEED_VARIABLE] = "0"
    return get_hash_fn_by_name(algorithm)(seed)


def drawn_hash_seed() -> bytes | None:
    """The hash that this process's engine core starts chains with; None before it was drawn."""
    from vllm.v1.core import kv_cache_utils

    return getattr(kv_cache_utils, "NONE_HASH", None)
