"""Finds the files of a model that vLLM reads. Only these decide the model's identity."""

from __future__ import annotations

import json
import os
from pathlib import Path

# The order in which vLLM's default loader looks, by its load format; the first pattern with a file wins.
PATTERNS = {
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin", "*.pt"),
}
# Loaders of their own, plugins': whatever can be weights.
ANY = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz", "*.tensors")
INDEXES = {"consolidated*.safetensors": "consolidated.safetensors.index.json"}
INDEX = "model.safetensors.index.json"
# Left by training beside the weights.
NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
# Files from which vLLM takes a model's configuration, and files that describe a quantization apart from it.
CONFIGURATIONS = ("config.json", "params.json")
QUANTIZATIONS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def model_folder(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """The folder of a model's files on this host: the model itself, or the hub's local copy. None if there is none."""
    path = Path(name)
    if path.exists():
        return path
    if "://" in name or os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        # Another hub may mean another model by the same name.
        return None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception:  # noqa: BLE001
        # The hub's library has many errors for "not here", and new ones in each release.
        return None


def hub_reference(folder: Path, revision: str | None) -> Path | None:
    """The file that says which commit a name means, of a hub's local copy; None where the revision is a commit."""
    return None if folder.name == revision else folder.parent.parent / "refs" / (revision or "main")


def weight_files(folder: Path, load_format: str) -> list[Path]:
    """The weight files that vLLM loads, and before them the index that names them; empty if there are none."""
    if folder.is_file():
        return [folder]
    if load_format == "auto":
        load_format = "mistral" if any(folder.glob("consolidated*.safetensors")) else "hf"
    known = PATTERNS.get(load_format)
    if known is None:
        return sorted(each for pattern in ANY for each in folder.rglob(pattern))
    for pattern in known:
        found = sorted(folder.glob(pattern))
        if not found:
            continue
        if pattern.endswith(".safetensors"):
            return _indexed(folder, found, INDEXES.get(pattern, INDEX))
        return [each for each in found if not each.name.endswith(NOT_WEIGHTS)]
    return []


def _indexed(folder: Path, found: list[Path], index: str) -> list[Path]:
    """Without the files that the index does not name: vLLM leaves them out."""
    path = folder / index
    if not path.is_file():
        return found
    try:
        named = set(json.loads(path.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return [path, *found]
    return [path, *(each for each in found if each.name in named)]


def configuration_files(folder: Path, trust_remote_code: bool) -> list[Path]:
    """Files beside the weights that say how they are used."""
    found = [folder / name for name in CONFIGURATIONS if (folder / name).is_file()]
    if not any(_describes_quantization(each) for each in found):
        found += [folder / name for name in QUANTIZATIONS if (folder / name).is_file()]
    if trust_remote_code:
        found += sorted(folder.glob("*.py"))
    return found


def _describes_quantization(path: Path) -> bool:
    try:
        values = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(values, dict) and any(
        name in values for name in ("quantization_config", "compression_config")
    )
