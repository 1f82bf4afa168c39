"""What requests say of direct hand-offs, and which addresses an engine connects to because of that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvlane.connector import direct_peers
from kvlane.connector.direct_peers import Peers, publish, published
from kvlane.connector.direct_request import Landing, Lending, NotDirect, direct_of

ID = "0123456789abcdef" * 2


def test_what_is_said_is_understood() -> None:
    assert direct_of({"do_remote_decode": True, "kvlane": {"handoff": ID}}) == Lending(ID)
    landing = Landing(ID, "127.0.0.1:7100")
    assert direct_of({"kvlane": {"handoff": ID, "peer": "127.0.0.1:7100"}}) == landing
    assert direct_of({"kvlane": Lending(ID).params("127.0.0.1:7100")}) == landing


def test_any_name_is_an_id_of_16_bytes_and_another_name_another_one() -> None:
    names = ("kvlane-0123456789ab-2s", ID, ID.upper(), "x")
    ids = {Lending(name).id for name in names}
    assert len(ids) == len(names) and {len(each) for each in ids} == {16}
    assert Landing("x", "127.0.0.1:1").id == Lending("x").id


def test_without_an_id_one_is_drawn_and_another_one_each_time() -> None:
    one, other = direct_of({"do_remote_decode": True}), direct_of({"do_remote_decode": True, "kvlane": None})
    assert isinstance(one, Lending) and isinstance(other, Lending) and one != other


@pytest.mark.parametrize(
    "params", [None, {}, 7, "x", {"kvlane": {"engine": "e"}}, {"do_remote_prefill": True, "remote_host": "h"}]
)
def test_what_says_nothing_of_it_is_none(params: object) -> None:
    assert direct_of(params) is None


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (7, "kvlane must be an object, not 7"),
        ({"handoff": ""}, "at most 128 letters"),
        ({"handoff": "a b", "peer": "127.0.0.1:1"}, "at most 128 letters"),
        ({"handoff": "a" * 129, "peer": "127.0.0.1:1"}, "at most 128 letters"),
        ({"handoff": 7, "peer": "127.0.0.1:1"}, "at most 128 letters"),
        ({"handoff": ID}, "peer must be HOST:PORT"),
        ({"handoff": ID, "peer": ""}, "peer must be HOST:PORT"),
        ({"handoff": ID, "peer": "1" * 10_000}, "peer must be HOST:PORT"),
        ({"handoff": ID, "peer": ["127.0.0.1:1"]}, "peer must be HOST:PORT"),
    ],
)
def test_nonsense_is_refused_in_one_short_sentence(named: object, said: str) -> None:
    with pytest.raises(NotDirect, match=said) as refused:
        direct_of({"kvlane": named})
    assert len(str(refused.value)) < 200


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(direct_peers._core, "runtime_folder", lambda: tmp_path)
    return tmp_path


def test_only_engines_of_this_user_and_named_networks_are_connected_to(folder: Path) -> None:
    publish("127.0.0.1:7100", os.getpid())
    nobody_named = Peers([])
    assert nobody_named.allows("127.0.0.1:7100")
    for other in (
        "127.0.0.1:7101",
        "127.0.0.2:7100",
        "10.0.0.1:7100",
        "[::1]:7100",
        "localhost:7100",
        "127.0.0.1",
        "127.0.0.1:0",
        "127.0.0.1:99999",
        "127.0.0.1:-1",
        "",
        "7100",
        "169.254.169.254:80",
    ):
        assert not nobody_named.allows(other), other
    some = Peers(["10.0.0.0/8", "fd00::/16"])
    assert some.allows("10.9.9.9:80") and some.allows("[fd00::1]:80")
    assert not some.allows("11.0.0.1:80") and not some.allows("127.0.0.1:80")


def test_what_engines_that_are_gone_have_left_is_taken_away(folder: Path) -> None:
    gone = folder / f"{2**22 + 1}-7100.direct"
    gone.write_text("127.0.0.1:7100")
    (folder / "strange.direct").write_bytes(b"\xff\xfe")
    publish("127.0.0.1:7200", os.getpid())
    assert published() == {"127.0.0.1:7200"}
    assert not gone.exists()


def test_a_folder_that_is_not_this_users_alone_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise OSError("others may write there")

    monkeypatch.setattr(direct_peers._core, "runtime_folder", refuse)
    publish("127.0.0.1:7100", os.getpid())
    assert published() == set()
    assert not Peers([]).allows("127.0.0.1:7100")
