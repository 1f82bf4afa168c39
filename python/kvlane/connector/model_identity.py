"""The identity of a model: the content of its weights and of its configuration, wherever they lie."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvlane.connector.digest import JsonValue, digest16
from kvlane.connector.engine_start import EngineStart
from kvlane.connector.groups import Unsupported
from kvlane.connector.guard import logger
from kvlane.connector.model_files import configuration_files, hub_reference, model_folder, weight_files
from kvlane.connector.weights_content import FilesChanging
from kvlane.connector.weights_memo import WeightsMemo, memo_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import LoadConfig, ModelConfig

# vLLM says by this that an engine joins others and takes its weights from them.
JOINS_OTHERS = "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"


def model_identity(model: ModelConfig, load: LoadConfig, start: EngineStart) -> dict[str, JsonValue]:
    """The identity of a model as JSON; `load` is vLLM's LoadConfig, `start` that of the engine. Raises Unsupported."""
    # For models in object storage vLLM replaces the name by a local folder of configuration files.
    name = str(getattr(model, "model_weights", "") or model.model)
    revision = getattr(model, "revision", None)
    load_format = str(getattr(load, "load_format", "auto"))
    folder = model_folder(name, revision, getattr(load, "download_dir", None))
    if os.environ.get(JOINS_OTHERS, "0") not in ("", "0"):
        # In the workers vLLM calls such weights dummy ones.
        _say_once(
            f"kvlane: the weights of {name} come from other engines, so this engine shares no blocks with others"
        )
        return {"life": start.life}
    identity: dict[str, JsonValue] = {
        "weights": _weights(model, name, revision, folder, load_format),
        "config": _configuration(model, name, revision, folder),
    }
    # Last, so that a change while the files were read here is seen too.
    if (
        folder is not None
        and "dummy" not in load_format
        and _may_have_changed(model, folder, load_format, start)
    ):
        _say_once(
            f"kvlane: the files of {name} were changed since this engine was started, so it is not known whether vLLM "
            "loaded the old ones or the new ones; the engine shares no blocks with others until it is restarted"
        )
        identity["life"] = start.life
    return identity


def _may_have_changed(model: ModelConfig, folder: Path, load_format: str, start: EngineStart) -> bool:
    """Whether vLLM may have read other files than are there now. It reads them minutes before it calls kvlane."""
    name = Path(str(getattr(model, "model_weights", "") or model.model))
    try:
        if name.exists():
            files = weight_files(folder, load_format)
            if folder.is_dir():
                files += configuration_files(folder, bool(getattr(model, "trust_remote_code", False)))
            # A folder or a file that was renamed may keep its own times; the folder that has it does not.
            return start.is_older_than_any([name, *files, *{each.parent for each in files}])
        # Files of a hub's copy stay as they are, but a name may come to mean another commit.
        reference = hub_reference(folder, getattr(model, "revision", None))
        if reference is None or not reference.exists() or not start.is_older_than(reference):
            return False
    except OSError as error:
        raise Unsupported(
            f"the files of {name} could not be looked at to tell them apart: {error}"
        ) from error
    return getattr(model.hf_config, "_commit_hash", None) != folder.name


def _weights(
    model: ModelConfig, name: str, revision: str | None, folder: Path | None, load_format: str
) -> dict[str, JsonValue]:
    if "dummy" in load_format:
        return {"dummy": model.seed}
    files = weight_files(folder, load_format) if folder is not None else []
    if files:
        try:
            content = _memo().content(files)
        except (OSError, FilesChanging) as error:
            raise Unsupported(
                f"the weights of {name} could not be read to tell them apart: {error}"
            ) from error
        if content.weaker:
            _say_once(
                f"kvlane: not all weights of {name} are safetensors files, so they are told apart by some of their "
                "pages, not by each tensor; after changing them in place give the engines another kvlane.namespace"
            )
        return {"content": content.digest}
    if Path(name).exists():
        raise Unsupported(
            f"{name} has no weight files that kvlane knows for the load format {load_format!r}, so it cannot be told "
            "apart from other models at the same place"
        )
    commit = getattr(model.hf_config, "_commit_hash", None)
    _say_once(
        f"kvlane: the weights of {name} are not in files of this host, so they are known by name, revision and "
        "commit only; after changing them in place give the engines another kvlane.namespace"
    )
    return {"name": name, "revision": str(revision), "commit": str(commit)}


def _configuration(
    model: ModelConfig, name: str, revision: str | None, folder: Path | None
) -> dict[str, JsonValue]:
    remote_code = bool(getattr(model, "trust_remote_code", False))
    identity: dict[str, JsonValue] = {}
    if remote_code:
        identity["code_revision"] = str(getattr(model, "code_revision", None))
    elsewhere = getattr(model, "hf_config_path", None)
    places = [model_folder(elsewhere, revision, None)] if elsewhere else []
    places += [folder, Path(model.model)]
    if folder is not None and not Path(name).exists():
        # vLLM keeps what it downloads besides weights in the hub's default folder.
        places.append(model_folder(name, revision, None))
    for place in places:
        files = configuration_files(place, remote_code) if place is not None and place.is_dir() else []
        if files:
            identity["files"] = [
                (each.name, hashlib.blake2b(each.read_bytes(), digest_size=16).hexdigest()) for each in files
            ]
            return identity
    identity["values"] = config_digest(model.hf_config)
    return identity


def config_digest(config: PretrainedConfig) -> str:
    """The digest of a model's configuration as transformers has it, wherever it was read."""
    # These two say how the file was read, not what is in it.
    values = {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }
    return digest16(values).hex()


@cache
def _memo() -> WeightsMemo:
    return WeightsMemo(memo_folder())


@cache
def _say_once(message: str) -> None:
    # Log "kvlane: the weights of <name> come from other engines, so this engine shares no blocks with others":
    # kvlane cannot know these weights. Do: load them from files if engines shall share blocks.
    # Log "kvlane: the files of <name> were changed since this engine was started, so it is not known whether vLLM
    # loaded the old ones or the new ones": the engine uses only its own blocks. Do: restart it.
    # Log "kvlane: not all weights of <name> are safetensors files, so they are told apart by some of their pages,
    # not by each tensor": a small change in place may go unnoticed. Do: after one, set another
    # `kvlane.namespace`.
    # Log "kvlane: the weights of <name> are not in files of this host, so they are known by name, revision and
    # commit only": a change in place goes unnoticed. Do: after one, set another `kvlane.namespace`.
    logger.warning("%s", message)
