"""Checks the JSON of vLLM's --kv-transfer-config for `kvlane doctor --engine-config`. Imports no vLLM.

`python -m kvlane.connector.settings_check` reads the JSON from stdin, and writes findings as JSON: objects with
`verdict` (ok, note or problem), `found`, `means` and `advice`, and the daemon that the engine will look for.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping

from kvlane.connector.settings import Settings

NAME = "KVLaneConnector"
MODULE = "kvlane.connector"
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
# The fields in vLLM 0.24 to 0.33, which refuses others.
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
    for key in config:
        if key not in _FIELDS:
            close = difflib.get_close_matches(str(key), _FIELDS, n=1, cutoff=0.7)
            advice = f"write {close[0]!r}" if close else f"leave it out; vLLM knows {', '.join(_FIELDS)}"
            findings.append(
                _finding("problem", f"the key {key!r} is unknown", "vLLM does not start with it", advice)
            )
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
    elif role != "kv_both":
        does = "saves and never loads" if role == "kv_producer" else "loads and never saves"
        findings.append(
            _finding(
                "note", f"kv_role is {role!r}", f"the engine {does}", 'write "kv_role": "kv_both" for both'
            )
        )
    settings = _settings(ours.get("kv_connector_extra_config"), ours.get("kv_buffer_size"), findings)
    if not findings:
        findings.append(_finding("ok", f"connector, role {role} and keys are right"))
    return findings, settings


def _ours(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """The part that is of kvlane: all of it, or one of several connectors."""
    if config.get("kv_connector") == NAME:
        return config
    extra = config.get("kv_connector_extra_config")
    if config.get("kv_connector") == "MultiConnector" and isinstance(extra, Mapping):
        connectors = extra.get("connectors")
        for each in connectors if isinstance(connectors, list) else []:
            if isinstance(each, Mapping) and each.get("kv_connector") == NAME:
                return each
    return None


def _settings(extra: object, buffer_size: object, findings: Findings) -> Settings | None:
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
    try:
        return Settings.parse(extra, buffer_size)
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
