"""The images and manifests in examples/ cannot be run here: they are parsed, and what they say to kvlane is checked.

In this folder because vLLM's environment has a YAML parser.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvlane.connector.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path for folder in ("containers", "kubernetes") for path in (ROOT / "examples" / folder).glob("*.yaml")
)
PREFIX = "--kv-transfer-config="


def _documents(path: Path) -> list[Any]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def _lists(node: Any) -> Iterator[list[Any]]:
    """Every list in a document, at any depth."""
    if isinstance(node, dict):
        for value in node.values():
            yield from _lists(value)
    elif isinstance(node, list):
        yield node
        for value in node:
            yield from _lists(value)


def _commands() -> list[tuple[str, list[str]]]:
    """The arguments of containers, with the file that has them."""
    return [
        (path.name, words)
        for path in FILES
        for document in _documents(path)
        for words in _lists(document)
        if words and all(isinstance(word, str) for word in words)
    ]


def _flags(words: list[str]) -> dict[str, str]:
    """Flags and their values, written as one word (--flag=value) or as two."""
    rest = iter(words)
    flags: dict[str, str] = {}
    for word in rest:
        flag, equals, value = word.partition("=")
        assert flag.startswith("--"), words
        flags[flag] = value if equals else next(rest)
    return flags


def _help(subcommand: str) -> str:
    return subprocess.run(
        ["kvlane", subcommand, "--help"], capture_output=True, text=True, check=True, timeout=30
    ).stdout


def test_there_is_something_to_check() -> None:
    assert {path.name for path in FILES} == {
        "compose.yaml",
        "daemon.yaml",
        "engine.yaml",
        "pod-monitor.yaml",
        "router.yaml",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_parses_and_manifests_name_their_kind(path: Path) -> None:
    documents = _documents(path)
    assert documents
    for document in documents:
        assert isinstance(document, dict)
        if path.parent.name == "kubernetes":
            assert document["apiVersion"]
            assert document["kind"]
            assert document["metadata"]["name"]


def test_every_flag_of_the_daemon_exists_and_takes_its_value() -> None:
    known = _help("serve")
    served = [words for _, words in _commands() if words[0] == "serve"]
    assert len(served) == 2, "compose and Kubernetes"
    for words in served:
        for flag in _flags(words[1:]):
            assert re.search(rf"^ +{flag} <", known, re.M), f"{flag} is no flag of kvlane serve"
        # The daemon parses sizes and numbers itself: it gets as far as an address that is none.
        told = subprocess.run(
            ["kvlane", *words, "--gpu", "off", "--listen", "unix:"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert "--listen 'unix:'" in told.stderr, told.stderr


def test_the_router_takes_its_flags_and_finds_its_engines() -> None:
    """It gets as far as the file of keys, which is not here."""
    (words,) = [words for name, words in _commands() if name == "router.yaml" and words[0] == "kvlane"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert "--api-key-file /etc/kvlane/keys: cannot be read" in done.stderr, done.stderr
    engines, budget, router, deployment = _documents(ROOT / "examples/kubernetes/router.yaml")
    (manifest,) = _documents(ROOT / "examples/kubernetes/engine.yaml")
    assert engines["spec"]["clusterIP"] == "None"
    assert engines["spec"]["selector"].items() <= manifest["spec"]["template"]["metadata"]["labels"].items()
    assert f"--worker-dns={engines['metadata']['name']}:{engines['spec']['ports'][0]['port']}" in words
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert router["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"] == labels
    monitors = _documents(ROOT / "examples/kubernetes/pod-monitor.yaml")
    assert labels in [monitor["spec"]["selector"]["matchLabels"] for monitor in monitors]


def test_a_router_that_is_replaced_ends_no_stream_and_turns_no_client_away() -> None:
    """The example had one replica, and SIGTERM closed its port while Kubernetes still sent clients there."""
    *_, deployment = _documents(ROOT / "examples/kubernetes/router.yaml")
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    seconds = {
        flag: int(value)
        for flag, _, value in (word.partition("=") for word in container["command"])
        if flag in ("--drain", "--drain-delay")
    }
    assert sum(seconds.values()) < pod["terminationGracePeriodSeconds"]
    probe = container["readinessProbe"]
    assert probe["httpGet"] == {"path": "/health", "port": "admin"}
    assert probe["periodSeconds"] * probe["failureThreshold"] < seconds["--drain-delay"]


def test_every_subcommand_that_is_called_exists() -> None:
    calls = [words for _, words in _commands() if "kvlane" in words[:2]]
    assert ["CMD", "kvlane", "status"] in calls
    for words in calls:
        _help(words[words.index("kvlane") + 1])


def test_engines_are_given_the_connector_as_it_is_called() -> None:
    given = [word for _, words in _commands() for word in words if word.startswith(PREFIX)]
    assert len(given) == 2, "compose and Kubernetes"
    for word in given:
        config = json.loads(word.removeprefix(PREFIX))
        assert config["kv_connector"] == "KVLaneConnector"
        assert config["kv_connector_module_path"] == "kvlane.connector"
        Settings.parse(config.get("kv_connector_extra_config"))


def test_daemon_and_engine_meet_at_one_socket() -> None:
    dockerfile = (ROOT / "examples/containers/Dockerfile").read_text()
    assert set(re.findall(r"KVLANE_(?:ADDR|LISTEN)=(\S+)", dockerfile)) == {"unix:/run/kvlane/kvlane.sock"}
    (compose,) = _documents(ROOT / "examples/containers/compose.yaml")
    for service in compose["services"].values():
        assert "/run/kvlane:/run/kvlane" in service["volumes"]
    for name in ("daemon.yaml", "engine.yaml"):
        (manifest,) = _documents(ROOT / "examples/kubernetes" / name)
        pod = manifest["spec"]["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        paths = {
            volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume
        }
        assert mounts["socket"] == paths["socket"] == "/run/kvlane"


def test_the_pool_fits_below_the_limit_of_its_container() -> None:
    (manifest,) = _documents(ROOT / "examples/kubernetes/daemon.yaml")
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    flags = _flags(container["args"][1:])
    pool_gib = int(flags["--pool-size"].removesuffix("gib"))
    limit_gib = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert pool_gib < limit_gib
    assert (
        int(flags["--drain-seconds"]) < manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    )
