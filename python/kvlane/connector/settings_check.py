"""Checks the JSON of vLLM's --kv-transfer-config for `kvlane doctor --engine-config`. Imports no vLLM.

`python -m kvlane.connector.settings_check` reads the JSON from stdin, and writes findings as JSON: objects with
`verdict` (ok, note or problem), `found`, `means` and `advice`, and the daemon that the engine will look for.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from kvlane.connector import p2p_keys
from kvlane.connector.p2p_pings import unreachable
from kvlane.connector.settings import PLAIN, Settings

NAME = "KVLaneConnector"
# Another connector may have this name, so a finding says whose it is.
ALIAS = "P2pNcclConnector"
MODULE = "kvlane.connector"
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
# The fields in vLLM 0.24 to 0.33, for the case that none is installed. vLLM refuses others.
_FIELDS = (
    "kv_connector",
    "engine_id",
    "kv_buffer_device",
    "kv_buffer_size",
    "kv_role",
    "kv_rank",
    "kv_parallel_size",
    "kv_ip",
    "kv_port",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
)
EXAMPLE = json.dumps({"kv_connector": NAME, "kv_connector_module_path": MODULE, "kv_role": "kv_both"})
Findings = list[dict[str, str]]


def _finding(verdict: str, found: str, means: str = "", advice: str = "") -> dict[str, str]:
    return {"verdict": verdict, "found": found, "means": means, "advice": advice}


def check(config: object) -> tuple[Findings, Settings | None]:
    """Findings, and the settings if they can be read."""
    if not isinstance(config, Mapping):
        refused = "the JSON has to be an object, in braces"
        return [_finding("problem", refused, "vLLM does not start with it", f"write {EXAMPLE}")], None
    findings: Findings = []
    ours, role = _ours(config), config.get("kv_role")
    version, known = installed_fields() or ("", _FIELDS)
    for key in config:
        if key not in known:
            findings.append(_unknown(str(key), version, known))
    if ours is None:
        named = config.get("kv_connector")
        findings.append(
            _finding(
                "problem",
                f"kv_connector is {named!r}" if named else "kv_connector is missing",
                "the engine does not use kvlane",
                f'write "kv_connector": "{NAME}"',
            )
        )
        return findings, None
    module = ours.get("kv_connector_module_path")
    if module not in (None, MODULE):
        findings.append(
            _finding(
                "problem",
                f"kv_connector_module_path is {module!r}",
                "vLLM looks for the connector there, and does not start",
                f'write "kv_connector_module_path": "{MODULE}"',
            )
        )
    if role not in _ROLES:
        findings.append(
            _finding(
                "problem",
                f"kv_role is {role!r}" if role is not None else "kv_role is missing",
                "vLLM does not start without one of its roles",
                'write "kv_role": "kv_both"; kv_producer only saves, and kv_consumer only loads',
            )
        )
    own = {key: ours[key] for key in p2p_keys.FIELDS if key in ours and key in known}
    settings = _settings(ours.get("kv_connector_extra_config"), own, findings)
    is_direct = settings is not None and settings.direct == "on"
    if role in _ROLES and role != "kv_both":
        does = "saves and never loads" if role == "kv_producer" else "loads and never saves"
        if is_direct:
            way = "hands prompts over and receives none" if role == "kv_producer" else "receives prompts"
            does = f"{way}; with a daemon it {does}"
        findings.append(
            _finding(
                "note", f"kv_role is {role!r}", f"the engine {does}", 'write "kv_role": "kv_both" for both'
            )
        )
    if settings is not None and is_direct:
        pings = f"; pings to {settings.proxy_ip}:{settings.proxy_port}" if settings.pings() else ""
        if why := unreachable(settings):
            means = "the proxy and other engines do not reach this one"
            findings.append(_finding("problem", why, means, "see docs/p2p-nccl.md, several hosts"))
        findings.append(_finding("ok", f"direct hand-offs, listening at {settings.direct_listen}{pings}"))
    if not findings:
        findings.append(_finding("ok", f"connector, role {role} and keys are right"))
    return findings, settings


def _ours(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """The part that is of kvlane: all of it, or one of several connectors."""
    if config.get("kv_connector") in (NAME, ALIAS):
        return config
    extra = config.get("kv_connector_extra_config")
    if config.get("kv_connector") == "MultiConnector" and isinstance(extra, Mapping):
        connectors = extra.get("connectors")
        for each in connectors if isinstance(connectors, list) else []:
            if isinstance(each, Mapping) and each.get("kv_connector") in (NAME, ALIAS):
                return each
    return None


def installed_fields() -> tuple[str, tuple[str, ...]] | None:
    """The version of the vLLM beside this Python, and the fields of its configuration, read from its source; None
    without a vLLM, or if its source cannot be read."""
    try:
        found = importlib.util.find_spec("vllm")
        version = importlib.metadata.version("vllm")
    except (ImportError, ValueError):
        return None
    if found is None or not found.submodule_search_locations:
        return None
    source = Path(found.submodule_search_locations[0]) / "config" / "kv_transfer.py"
    try:
        tree = ast.parse(source.read_text())
    except (OSError, SyntaxError, ValueError):
        return None
    fields = [
        line.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "KVTransferConfig"
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    return (version, tuple(fields)) if fields else None


def _unknown(key: str, version: str, known: tuple[str, ...]) -> dict[str, str]:
    vllm = f"vLLM {version}".strip()
    if key in _FIELDS or key in PLAIN or key in p2p_keys.WITHOUT_EFFECT:
        return _finding(
            "problem",
            f"{vllm} has no key {key!r}",
            "it does not start with it",
            f'move it into "kv_connector_extra_config", where kvlane reads it: {{"{key}": ...}}'
            if key in PLAIN
            else "leave it out: kvlane has no use for it",
        )
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    advice = f"write {close[0]!r}" if close else f"leave it out; {vllm} knows {', '.join(known)}"
    return _finding("problem", f"the key {key!r} is unknown", "vLLM does not start with it", advice)


def _settings(extra: object, own: Mapping[str, object], findings: Findings) -> Settings | None:
    if extra is not None and not isinstance(extra, Mapping):
        findings.append(
            _finding(
                "problem",
                f"kv_connector_extra_config is {extra!r}, and has to be an object",
                "vLLM does not start with it",
                'write for example "kv_connector_extra_config": {"kvlane.address": "unix:/run/kvlane/kvlane.sock"}',
            )
        )
        return None
    for sentence in p2p_keys.read(extra, own).ignored:
        findings.append(_finding("problem", sentence, "the engine starts without it", "correct it"))
    try:
        return Settings.parse(extra, own)
    except ValueError as error:
        means = "the engine does not start with it"
        findings.append(_finding("problem", str(error), means, "correct it, and run this again"))
        return None


def main() -> None:
    """Stdin to stdout."""
    text = sys.stdin.read()
    settings = None
    try:
        findings, settings = check(json.loads(text))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}: {error.msg}"
        findings = [
            _finding("problem", f"it is no JSON ({where})", "vLLM does not start with it", f"write {EXAMPLE}")
        ]
    daemon = None
    if settings is not None and settings.daemon != "off":
        is_needed = settings.needs_daemon()
        daemon = {"address": settings.address, "user": settings.daemon_user, "is_needed": is_needed}
    print(json.dumps({"findings": findings, "daemon": daemon}))


if __name__ == "__main__":
    main()
