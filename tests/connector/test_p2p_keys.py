"""Configurations of vLLM's P2P NCCL connector: how their keys are read, and what `kvlane doctor` says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlane.connector import p2p_keys, settings_check
from kvlane.connector.settings import Settings
from kvlane.connector.settings_check import EXAMPLE, check

ON = {"kvlane.direct": "on"}
# The configurations of a prefill and a decode engine in vLLM's own guide, in the places where vLLM 0.32 takes them.
PREFILL = {
    "kv_connector": "P2pNcclConnector",
    "kv_role": "kv_producer",
    "kv_port": "21001",
    "kv_connector_extra_config": {
        "kv_buffer_size": "1e1",
        "proxy_ip": "127.0.0.1",
        "proxy_port": "30001",
        "http_port": "20001",
    },
}
OLD_KEYS = {
    "send_type": "PUT",
    "kv_buffer_size": "8e9",
    "mem_pool_size_gb": "32",
    "nccl_num_channels": "16",
    "proxy_ip": "10.0.1.1",
    "proxy_port": "30001",
    "http_port": "20001",
    "kv_port": "21001",
}


def test_a_configuration_of_the_guide_means_direct_hand_offs() -> None:
    settings = Settings.parse(PREFILL["kv_connector_extra_config"], {"kv_port": 21001})  # pyright: ignore
    assert (settings.direct, settings.direct_listen) == ("on", "127.0.0.1:21001")
    assert (settings.proxy_ip, settings.proxy_port, settings.http_port) == ("127.0.0.1", 30001, 20001)
    assert (settings.send_type, settings.kv_buffer_size) == ("PUT_ASYNC", 10)


@pytest.mark.parametrize("key", OLD_KEYS)
def test_each_key_alone_switches_direct_hand_offs_on_and_off_wins(key: str) -> None:
    assert Settings.parse({key: OLD_KEYS[key]}).direct == "on"
    assert Settings.parse({key: OLD_KEYS[key], "kvlane.direct": "off"}) == Settings(direct="off")


@pytest.mark.parametrize(
    "own",
    [
        None,
        {},
        {"kv_port": 14579},
        {"kv_port": 14579, "kv_buffer_size": 1e9},
        {"kv_port": "14579"},
        {"kv_buffer_size": "1e9"},
    ],
)
def test_defaults_of_vllms_own_fields_count_as_missing(own: dict[str, object] | None) -> None:
    assert Settings.parse({}, own) == Settings()
    assert Settings.parse(ON, own).direct_listen == "127.0.0.1:0"


def test_a_key_counts_before_vllms_own_field_and_listen_before_kv_port() -> None:
    settings = Settings.parse(
        {"kv_port": 21002, "kv_buffer_size": 1e9}, {"kv_port": 21001, "kv_buffer_size": 2e9}
    )
    assert (settings.direct_listen, settings.kv_buffer_size) == ("127.0.0.1:21002", 1e9)
    named = Settings.parse({"kvlane.direct.listen": "127.0.0.1:7100", "kv_port": 21002})
    assert named.direct_listen == "127.0.0.1:7100"


@pytest.mark.parametrize("word", ["PUT_ASYNC", "PUT", "GET"])
def test_the_case_of_send_type_does_not_count(word: str) -> None:
    for written in (word, word.lower(), word.title()):
        assert Settings.parse({**ON, "send_type": written}).send_type == word


@pytest.mark.parametrize(
    ("value", "size"),
    [("8e9", 8e9), ("1e1", 10.0), (1 << 30, float(1 << 30)), (0.5, 0.5), ("4096", 4096.0), (None, None)],
)
def test_kv_buffer_size_is_a_number_or_the_text_of_one(value: object, size: float | None) -> None:
    assert Settings.parse({**ON, "kv_buffer_size": value}).kv_buffer_size == size


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("send_type", value) for value in ("FOO", "GET ", 1, ["GET"])),
        *(
            ("kv_buffer_size", value)
            for value in (0, -1, "-1", "8GB", "nan", float("inf"), 10**400, True, [1])
        ),
        *(
            (key, value)
            for key in ("proxy_port", "http_port", "kv_port")
            for value in ("abc", 0, "0", -1, 65536, 1.5, True, "８０")
        ),
        *(("proxy_ip", value) for value in (7, "a b", "a*b", "tcp://h", "x" * 300)),
    ],
)
def test_a_value_that_makes_no_sense_counts_as_missing_and_one_sentence_says_so(
    key: str, value: object
) -> None:
    assert Settings.parse({**ON, key: value}) == Settings.parse(ON)
    assert Settings.parse({key: value}).direct == "on"
    (sentence,) = p2p_keys.read({key: value}).ignored
    assert sentence.startswith(f"{key} must be ") and repr(value)[:80] in sentence and len(sentence) < 300


def test_a_proxy_without_a_port_is_named() -> None:
    assert p2p_keys.read({"proxy_ip": "h"}).ignored == [
        "proxy_ip is there and proxy_port is not: this engine sends no pings"
    ]
    assert p2p_keys.read({"proxy_port": 1}).ignored == [
        "proxy_port is there and proxy_ip is not: this engine sends no pings"
    ]
    assert p2p_keys.read({"proxy_ip": "h", "proxy_port": "30001"}).ignored == []
    assert p2p_keys.read({"proxy_ip": "", "proxy_port": ""}).ignored == []


@pytest.mark.parametrize("key", OLD_KEYS)
def test_with_our_prefix_they_are_named_without_it(key: str) -> None:
    with pytest.raises(ValueError, match=f"write '{key}'"):
        Settings.parse({**ON, f"kvlane.{key}": OLD_KEYS[key]})


# kvlane doctor --engine-config


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has `settings_check` find a vLLM with these fields."""

    def install(*fields: str) -> None:
        package = tmp_path / "vllm"
        (package / "config").mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('it is not imported')\n")
        lines = "".join(f"    {each}: int = 0\n" for each in fields)
        (package / "config/kv_transfer.py").write_text(f"class KVTransferConfig:\n{lines}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(settings_check.importlib.metadata, "version", lambda name: "0.32.0")

    return install


FIELDS = (
    "kv_connector",
    "engine_id",
    "kv_role",
    "kv_port",
    "kv_connector_extra_config",
    "kv_connector_module_path",
)


def test_doctor_checks_against_the_installed_vllm(installed: Any) -> None:
    installed(*FIELDS)
    found, settings = check(PREFILL)
    assert [each["verdict"] for each in found] == ["note", "ok"], "kv_producer is worth a note"
    assert found[1]["found"] == ("direct hand-offs, listening at 127.0.0.1:21001; pings to 127.0.0.1:30001")
    assert settings is not None and settings.direct_listen == "127.0.0.1:21001"
    (problem, *_), _ = check({**PREFILL, "kv_buffer_size": "1e1"})
    assert problem["found"] == "vLLM 0.32.0 has no key 'kv_buffer_size'"
    assert (
        '"kv_connector_extra_config"' in problem["advice"] and '{"kv_buffer_size": ...}' in problem["advice"]
    )
    (problem, *_), _ = check({**PREFILL, "kv_rank": 0})
    assert problem["found"] == "vLLM 0.32.0 has no key 'kv_rank'" and "leave it out" in problem["advice"]
    (problem, *_), _ = check({**PREFILL, "kv_rol": 0})
    assert problem["advice"] == "write 'kv_role'"


def test_doctor_says_that_a_proxy_elsewhere_cannot_reach_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_check, "installed_fields", lambda: None)
    extra = {"proxy_ip": "10.0.1.1", "proxy_port": 30001}
    (_, problem, _), _ = check({**PREFILL, "kv_connector_extra_config": extra})
    assert problem["verdict"] == "problem" and "give kvlane.direct.listen" in problem["found"]
    own = {"kvlane.direct.listen": "10.0.1.2:21001", "kvlane.direct.token": "t"}
    found, _ = check({**PREFILL, "kv_connector_extra_config": {**extra, **own}})
    assert [each["verdict"] for each in found] == ["note", "ok"]


def test_doctor_without_vllm_knows_the_fields_of_all_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_check, "installed_fields", lambda: None)
    found, _ = check({**PREFILL, "kv_buffer_size": "1e1", "kv_rank": 0})
    assert [each["verdict"] for each in found] == ["note", "ok"]


def test_doctor_names_each_value_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_check, "installed_fields", lambda: None)
    config = {**json.loads(EXAMPLE), "kv_connector_extra_config": {"send_type": "FOO", "proxy_port": "abc"}}
    found, settings = check({**config, "kv_buffer_size": -1})
    assert settings is not None and settings.direct == "on"
    assert [(each["verdict"], each["found"].partition(" must")[0]) for each in found] == [
        ("problem", "send_type"),
        ("problem", "kv_buffer_size"),
        ("problem", "proxy_port"),
        ("ok", "direct hand-offs, listening at 127.0.0.1:0"),
    ]
