import pytest

from kvlane.connector.settings import Settings


def test_defaults_without_any_key() -> None:
    assert Settings.parse(None) == Settings.parse({}) == Settings()


def test_keys_of_others_are_ignored_and_own_ones_are_typed() -> None:
    settings = Settings.parse(
        {"shared_storage_path": 3, "kvlane.address": "unix:/run/k", "kvlane.lookup_timeout_ms": 20}
    )
    assert settings.address == "unix:/run/k"
    assert settings.lookup_timeout_ms == 20.0
    assert isinstance(settings.lookup_timeout_ms, float)
    assert Settings.parse({"kvlane.daemon_user": "kv"}).daemon_user == "kv"
    assert Settings.parse({"kvlane.daemon_user": 1000}).daemon_user == "1000"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"kvlane.adress": "x"}, ["'kvlane.adress'", "kvlane.address"]),
        ({"kvlane.save": "yes"}, ["kvlane.save", "true or false", "'yes'"]),
        ({"kvlane.lookup_wait_us": 1.5}, ["kvlane.lookup_wait_us", "whole number", "1.5"]),
        ({"kvlane.lookup_wait_us": True}, ["kvlane.lookup_wait_us", "whole number", "True"]),
        ({"kvlane.lookup_wait_us": -1}, ["kvlane.lookup_wait_us", "0 to 10000", "-1"]),
        ({"kvlane.lookup_timeout_ms": "fast"}, ["kvlane.lookup_timeout_ms", "a number", "'fast'"]),
        ({"kvlane.lookup_timeout_ms": 0}, ["kvlane.lookup_timeout_ms", "1 to 60000", "0.0"]),
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
