"""Request ids of proxies for vLLM's P2P NCCL connector, as engines of 0.24 to 0.33 get them."""

from __future__ import annotations

import pytest
from fakes import Request
from hypothesis import given
from hypothesis import strategies as st
from test_direct import OWN, TOKENS, World

from kvlane.connector.direct_request import Landing, Lending, NotDirect, direct_of
from kvlane.connector.p2p_ids import BadId, Pair, pair_of

NAME = "0123456789abcdef" * 2
P, D = "10.0.0.1:21001", "10.0.0.2:22001"


def from_proxy(prefill: str = P, decode: str = D, name: str = NAME) -> str:
    return f"___prefill_addr_{prefill}___decode_addr_{decode}_{name}"


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("", "", NAME),
        ("cmpl-", "-0", f"{NAME}-0"),
        ("cmpl-", "-3-9f8e7d6c", f"{NAME}-3"),
        ("1_cmpl-", "-0-9f8e7d6c", f"{NAME}-0"),
        ("chatcmpl-", "", NAME),
        ("chatcmpl-", "-9f8e7d6c", NAME),
        ("chatcmpl-", "-12345678", NAME),
        ("3_chatcmpl-", "-12345678", NAME),
        ("resp_", "-9f8e7d6c", NAME),
        ("cmpl-kvlane-0123456789ab-2s-w0", "-0-9f8e7d6c", f"{NAME}-0"),
    ],
)
def test_an_engine_finds_the_pair_in_its_own_id(before: str, after: str, name: str) -> None:
    """vLLM writes cmpl- or chatcmpl- before a client's id, the number of a sample before that, the number of a prompt
    after it, and eight random digits, unless VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set."""
    assert pair_of(before + from_proxy() + after) == Pair(P, D, name)


@given(st.text(max_size=40), st.text(max_size=40))
def test_whatever_stands_around_it_is_understood_or_refused(before: str, after: str) -> None:
    try:
        pair = pair_of(before + from_proxy() + after)
    except BadId:
        return
    assert pair is None or (pair.prefill, pair.decode) == (P, D) or "___" in before + after


@pytest.mark.parametrize("address", ["[::1]:21001", "node-1.cluster.local:21001", "10.0.0.1:65535"])
def test_addresses_are_of_any_kind(address: str) -> None:
    assert pair_of(from_proxy(address)) == Pair(address, D, NAME)


@pytest.mark.parametrize("request_id", ["", "cmpl-1-0", "___decode_addr_", "prefill_addr_" + P])
def test_other_ids_name_no_pair(request_id: str) -> None:
    assert pair_of(request_id) is None


@pytest.mark.parametrize(
    ("request_id", "words"),
    [
        (from_proxy(name="0123"), "is not ___prefill_addr_HOST:PORT"),
        (from_proxy(name=NAME + "00"), "is not ___prefill_addr_HOST:PORT"),
        ("___prefill_addr_10.0.0.1:21001_" + NAME, "is not ___prefill_addr_HOST:PORT"),
        (from_proxy("10.0.0.1"), "no HOST:PORT"),
        (from_proxy("10.0.0.1:0"), "no HOST:PORT"),
        (from_proxy(decode="10.0.0.2:65536"), "no HOST:PORT"),
        (from_proxy(decode="10.0.0.2:http"), "no HOST:PORT"),
        (from_proxy(P, P), "on both sides"),
        (from_proxy() + "x" * 10_000, "more than 700"),
    ],
)
def test_an_id_that_cannot_be_used_gets_one_sentence(request_id: str, words: str) -> None:
    with pytest.raises(NotDirect) as error:
        direct_of(None, request_id, OWN)
    assert words in str(error.value) and len(str(error.value)) < 250


def test_the_engine_at_the_prefill_address_is_p_and_every_other_one_d() -> None:
    assert direct_of(None, from_proxy(OWN, D), OWN) == Lending(NAME)
    assert direct_of({}, from_proxy(P, OWN), OWN) == Landing(NAME, P)
    assert Lending(NAME).id == Landing(NAME, P).id


@pytest.mark.parametrize(
    "params",
    [
        {"kvlane": {"engine": "e", "run": "r", "daemon": "d", "tokens": 5}},
        {"do_remote_prefill": True, "remote_host": "h"},
    ],
)
def test_what_a_request_says_itself_counts_before_its_id(params: dict[str, object]) -> None:
    """vllm-router writes ids of this form with the addresses of HTTP servers in them."""
    assert direct_of(params, from_proxy(), OWN) is None
    assert isinstance(direct_of({"do_remote_decode": True}, from_proxy(P, OWN), OWN), Lending)


def test_a_prompt_is_lent_by_its_id() -> None:
    world = World()
    request = Request("cmpl-" + from_proxy(OWN) + "-0-9f8e7d6c", list(range(TOKENS)))
    world.side.add_request(request)
    world.engine.compute(request, TOKENS)
    name = Lending(f"{NAME}-0").id
    assert world.agent.lendings == [name]
    assert world.agent.held == {name}, "the decode engine is asked once this one has answered"
    world.side.request_finished(request, world.engine.tables[request.request_id])
    assert world.agent.held == set() and world.agent.given_up == []


def test_samples_of_a_prompt_are_lent_once_and_none_is_counted_as_refused() -> None:
    world = World()
    for sample in range(3):
        name = f"{sample}_cmpl-{from_proxy(OWN)}-0-9f8e7d6c"
        world.side.add_request(Request(name, list(range(TOKENS))))
    assert world.agent.lendings == [Lending(f"{NAME}-0").id]
    assert "direct_not_offered" not in (world.side.take_stats() or {})


def test_a_prompt_waits_for_the_engine_that_its_id_names() -> None:
    world = World()
    peer = "127.0.0.1:7100"
    request = Request("cmpl-" + from_proxy(peer, OWN) + "-0", list(range(TOKENS)))
    world.side.add_request(request)
    assert world.waits(request)
    world.step()
    assert list(world.agent.landings) == [Landing(f"{NAME}-0", peer).id]


@pytest.mark.parametrize("peer", ["10.9.9.9:21001", "somewhere.example:21001"])
def test_an_address_that_is_not_allowed_is_not_dialled(peer: str) -> None:
    world = World()
    request = Request("cmpl-" + from_proxy(peer, OWN) + "-0", list(range(TOKENS)))
    world.side.add_request(request)
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert world.agent.landings == {}
