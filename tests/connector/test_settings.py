import re

import pytest

from kvlane.connector.settings import Settings


def test_defaults_without_any_key() -> None:
    assert Settings.parse(None) == Settings.parse({}) == Settings()


def test_keys_of_others_are_ignored_and_own_ones_are_typed() -> None:
    settings = Settings.parse(
        {"shared_storage_path": 3, "kvlane.address": "unix:/run/k", "kvlane.lookup_timeout_ms": 20}
    )
    assert settings.address == "unix:/run/k"
    assert Settings.parse({"kvlane.address": "/run/k"}).address == "/run/k"
    assert settings.lookup_timeout_ms == 20.0
    assert isinstance(settings.lookup_timeout_ms, float)
    assert Settings.parse({"kvlane.daemon_user": "kv"}).daemon_user == "kv"
    assert Settings.parse({"kvlane.daemon_user": 1000}).daemon_user == "1000"


# Keys of connectors that may be configured beside kvlane's or instead of it.
OTHERS = {
    "shared_storage_path": "/x", "backends": ["UCX"], "num_threads": 4, "cpu_bytes_to_use": 1 << 30, "block_size": 16,
    "connectors": [], "spec_name": "CPUOffloadingSpec", "lmcache.mp.host": "h", "use_layerwise": True, "loads": 1,
    "host_pool_gib": 3, "mooncake_protocol": "rdma", "eviction_policy": "lru", "lookup_rpc_port": 0,
    "proxy_ping_port": 36367, "proxy_host": "h", "handshake_port": 6301,
}  # fmt: skip


@pytest.mark.parametrize("key", OTHERS)
def test_a_key_of_another_connector_is_left_alone(key: str) -> None:
    assert Settings.parse({key: OTHERS[key]}) == Settings()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"kvlane.adress": "x"}, ["'kvlane.adress'", "did you mean 'kvlane.address'?"]),
        ({"kvlane.lookup-wait-us": 3}, ["'kvlane.lookup-wait-us'", "did you mean 'kvlane.lookup_wait_us'?"]),
        ({"kvlane_address": "x"}, ["'kvlane_address'", "did you mean 'kvlane.address'?"]),
        ({"KVLane.Save": True}, ["'KVLane.Save'", "did you mean 'kvlane.save'?"]),
        (
            {"kvlane.color": 1},
            ["'kvlane.color'", "kvlane knows kvlane.address, kvlane.daemon, kvlane.daemon_user"],
        ),
        ({"kvlane": {"address": "x"}}, ["'kvlane'", "kvlane knows kvlane.address"]),
        ({"address": "unix:/x"}, ["'address'", "write 'kvlane.address'"]),
        ({"lookup_timeout": 20}, ["'lookup_timeout'", "write 'kvlane.lookup_timeout_ms'"]),
        ({"adress": "unix:/x"}, ["'adress'", "write 'kvlane.address'"]),
        ({"save": False}, ["'save'", "write 'kvlane.save'"]),
        (
            {"kvlane.address": "127.0.0.1:9000"},
            ["kvlane.address", "'127.0.0.1:9000'", "Unix socket", "unix:PATH"],
        ),
        ({"kvlane.address": "tcp://127.0.0.1:9000"}, ["'tcp://127.0.0.1:9000'", "Unix socket", "unix:PATH"]),
        ({"kvlane.address": "http://127.0.0.1:9091"}, ["'http://127.0.0.1:9091'", "unix:PATH"]),
        ({"kvlane.address": "unix:"}, ["kvlane.address", "'unix:'", "unix:PATH"]),
        ({"kvlane.address": "kvhost"}, ["kvlane.address", "'kvhost'", "unix:PATH"]),
        ({"kvlane.save": "yes"}, ["kvlane.save", "true or false", "'yes'"]),
        ({"kvlane.lookup_wait_us": 1.5}, ["kvlane.lookup_wait_us", "whole number", "1.5"]),
        ({"kvlane.lookup_wait_us": True}, ["kvlane.lookup_wait_us", "whole number", "True"]),
        ({"kvlane.lookup_wait_us": -1}, ["kvlane.lookup_wait_us", "0 to 10000", "-1"]),
        ({"kvlane.lookup_timeout_ms": "fast"}, ["kvlane.lookup_timeout_ms", "a number", "'fast'"]),
        ({"kvlane.lookup_timeout_ms": 0}, ["kvlane.lookup_timeout_ms", "1 to 60000, not 0"]),
        ({"kvlane.lookup_timeout_ms": 10**400}, ["kvlane.lookup_timeout_ms", "1 to 60000"]),
        ({"kvlane.max_pinned_share": 1.5}, ["kvlane.max_pinned_share", "0.9", "1.5"]),
        ({"kvlane.save_method": "rdma"}, ["kvlane.save_method", "process_vm", "'rdma'"]),
        ({"kvlane.layout": "blocks"}, ["kvlane.layout", "auto, block, layer", "'blocks'"]),
        ({"kvlane.namespace": 7}, ["kvlane.namespace", "a string", "7"]),
        ({"kvlane.daemon_user": True}, ["kvlane.daemon_user", "a string", "True"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(extra: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        Settings.parse(extra)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"kvlane.direct": "yes"}, "kvlane.direct must be one of on, off"),
        ({"kvlane.direct.listen": "host:1"}, "a number for the host"),
        ({"kvlane.direct.listen": "127.0.0.1:70000"}, "kvlane.direct.listen"),
        ({"kvlane.direct.listen": "10.0.0.1:7100"}, "needs a kvlane.direct.token"),
        ({"kvlane.direct.peers": "10.0.0.0/8, nonsense"}, "'nonsense'"),
        ({"kvlane.direct.wait_ms": -1}, "kvlane.direct.wait_ms must be 0 to 3600000, not -1"),
        ({"kvlane.direct_listen": "127.0.0.1:1"}, "did you mean 'kvlane.direct.listen'"),
    ],
)
def test_a_wrong_key_of_direct_hand_offs_is_named(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Settings.parse(extra)


def test_keys_of_direct_hand_offs_are_read() -> None:
    extra = {
        "kvlane.direct": "on",
        "kvlane.direct.listen": "10.0.0.1:7100",
        "kvlane.direct.token": "secret",
        "kvlane.direct.peers": "10.0.0.0/8, ::1",
    }
    settings = Settings.parse(extra)
    assert (settings.direct, settings.direct_listen, settings.direct_token) == (
        "on",
        "10.0.0.1:7100",
        "secret",
    )
    assert settings.networks() == ["10.0.0.0/8", "::1"]
