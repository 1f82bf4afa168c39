"""Finds the multimodal inputs of a request whose names identify their content.

vLLM names an image or a sound by a digest of its content, and a block's hash holds that name. If both prefix caching
and the processor's cache are off, vLLM saves the digest and counts: `renderer0-mm-7-image-0`. Each engine counts from
one, so the same name means another image in every engine and after every restart.

Names that users give (`multi_modal_uuids`) are their promise that equal names mean equal inputs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvlane.connector.vllm_protocols import features

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTED = re.compile(r"(?:.*:)?renderer\d+-mm-\d+-.+-\d+", re.DOTALL)
"""A counter's name; with an adapter for the input's own model, after the adapter's name."""
DIGEST = re.compile(r"(?:.*:)?[0-9a-f]{32,}", re.DOTALL)


def names_are_content(vllm_config: VllmConfig) -> bool:
    """Whether this engine's own names of multimodal inputs are digests of their content."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if multimodal is None:
        return True
    return multimodal.mm_processor_cache_gb != 0 or bool(vllm_config.cache_config.enable_prefix_caching)


def has_counted_inputs(request: object, names_are_content: bool) -> bool:
    """Whether a multimodal input of the request may have a name that is only a number.

    Where the engine counts, a digest may be one of a counter's name together with the processor's options; so may a
    user's own name be that looks like a digest.
    """
    for feature in features(request):
        name = feature.identifier
        if COUNTED.fullmatch(name) or (not names_are_content and DIGEST.fullmatch(name)):
            return True
    return False
