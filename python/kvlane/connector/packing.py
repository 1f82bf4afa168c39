"""Names the order of keys and values inside a block, if the tensor's dimensions do not determine it.

vLLM's backend for CPUs chooses a packing (amx, vec, neon, ..) by the processor, the data type and the sizes. All
packings have one shape and one backend name, so a block of another packing would be read as wrong numbers.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

from kvlane.connector import capabilities
from kvlane.connector.groups import Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

_CHOICE = "_get_attn_isa"
"""vLLM's function, in the backend's module, that chooses the packing."""
_PACKS = "CPU_ATTN"
"""The backend that has packings in every version of vLLM."""


def backend_name(backend: object, vllm_config: VllmConfig, spec: KVCacheSpec) -> str:
    """The name of a layer's attention backend, with its packing if it has several, `CPU_ATTN/amx`, and how tokens are
    dealt to context-parallel ranks. "" for neither. Raises Unsupported if the backend has packings and vLLM does not
    reveal which one it uses."""
    name = "" if backend is None else _packed(backend, vllm_config, spec)
    ranks = capabilities.context_ranks(vllm_config, spec)
    if ranks == 1:
        return name
    # The layout has the rank's number beside this. The daemon takes names of at most 64 bytes.
    return f"{name}, {capabilities.context_interleave(vllm_config)} tokens x {ranks} ranks"


def _packed(backend: object, vllm_config: VllmConfig, spec: KVCacheSpec) -> str:
    name = str(backend.get_name())  # pyright: ignore[reportAttributeAccessIssue]
    modules = (sys.modules.get(kind.__module__) for kind in getattr(backend, "__mro__", ()))
    choose = next((found for each in modules if (found := getattr(each, _CHOICE, None))), None)
    if choose is None:
        if name == _PACKS:
            raise Unsupported(
                f"this vLLM does not tell how its attention backend {name} packs keys and values"
            )
        return name
    decides = {
        "dtype": vllm_config.model_config.dtype,
        "block_size": getattr(spec, "block_size", None),
        "head_size": getattr(spec, "head_size", None),
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
    }
    asked = inspect.signature(choose).parameters
    if not asked.keys() <= decides.keys():
        raise Unsupported(
            f"this vLLM chooses how its attention backend {name} packs keys and values by {', '.join(asked)}, not all "
            "of which kvlane knows"
        )
    return f"{name}/{choose(**{each: decides[each] for each in asked})}"
