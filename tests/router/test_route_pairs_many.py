"""Several prefill and decode engines of each kind of pair, while they fail in each phase and come back."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from processes import until
from routed import COMPLETIONS, LONG, Router, ask, connect, wanted, words_of

from kvlane.testing.fake_engine import FakeEngine

# The fake's form of each connector.
FORMS = {"store": "kvlane", "nixl": "nixl", "p2p-nccl": "p2p-nccl", "direct": "direct"}
STATES = {"running", "waiting"}


class Pairs:
    """Prefill and decode engines of one kind before a router, by a file."""

    def __init__(
        self, stack: ExitStack, folder: Path, kind: str, shape: tuple[int, int], flags: dict[str, list[str]]
    ) -> None:
        self._stack, self._kind, self._flags = stack, kind, flags
        self.prefills = [self.start("prefill") for _ in range(shape[0])]
        self.decodes = [self.start("decode") for _ in range(shape[1])]
        config = folder / "route.toml"
        tables = [self._table(each, "prefill") for each in self.prefills]
        tables += [self._table(each, "decode") for each in self.decodes]
        config.write_text("\n".join(tables))
        flags_of_router = ("--config", str(config), "--policy", "round-robin")
        self.router = stack.enter_context(Router(*flags_of_router, nodes=sum(shape)))

    def start(self, role: str, port: int | None = None) -> FakeEngine:
        port = port or free_port()
        named = ["--role", role[0].upper(), "--zmq-address", zmq_of(port)]
        flags = ["--pairs", FORMS[self._kind], "--port", str(port), *self._flags.get(role, [])]
        return self._stack.enter_context(FakeEngine(*flags, *(named if self._kind == "p2p-nccl" else [])))

    def again(self, engine: FakeEngine, role: str) -> FakeEngine:
        """The same engine, started anew at its address."""
        return self.start(role, int(engine.address.split(":")[1]))

    def _table(self, engine: FakeEngine, role: str) -> str:
        at = zmq_of(int(engine.address.split(":")[1]))
        # A decode engine hands nothing over.
        keys = {
            ("p2p-nccl", "prefill"): "zmq",
            ("p2p-nccl", "decode"): "zmq",
            ("direct", "prefill"): "handoff",
        }
        key = keys.get((self._kind, role))
        more = f'{key} = "{at}"' if key else ""
        return f'[[node]]\nurl = "{engine.url}"\nrole = "{role}"\nconnector = "{self._kind}"\n{more}\n'

    def ask(self, prompt: str = LONG, **more: object) -> tuple[int, Any]:
        status, answer, _ = ask(self.router.address, COMPLETIONS, wanted(prompt, **more))
        return status, answer


def zmq_of(port: int) -> str:
    return f"127.0.0.1:{port - 1000}"


@contextmanager
def pairs(folder: Path, kind: str, shape: tuple[int, int], **flags: list[str]) -> Iterator[Pairs]:
    with ExitStack() as stack:
        yield Pairs(stack, folder, kind, shape, flags)


def legs(engines: list[FakeEngine]) -> list[str]:
    return [seen["leg"] for each in engines for seen in each.log()]


@pytest.mark.parametrize("kind", list(FORMS))
def test_each_kind_of_pair_serves_as_its_connector_wants(tmp_path: Path, kind: str) -> None:
    with pairs(tmp_path, kind, (2, 2)) as found:
        met = set()
        for number in range(8):
            status, answer = found.ask(f"{number} " + LONG, stream=number % 2 == 1)
            assert status == 200, answer
            (first,) = [seen for each in found.prefills for seen in each.log(clear=True)]
            (second,) = [seen for each in found.decodes for seen in each.log(clear=True)]
            assert (first["leg"], second["leg"]) == ("prefill", "decode")
            one, other = json.loads(first["body"]), json.loads(second["body"])
            assert one["max_tokens"] == 1 and "stream" not in one
            if kind == "p2p-nccl":
                assert first["id"] == second["id"]
                addresses = re.match(
                    r"kvlane-\S+?___prefill_addr_(.+?)___decode_addr_(.+?)_[0-9a-f]{32}$", first["id"]
                )
                assert addresses is not None
                met.add(addresses.groups())
                assert other == wanted(f"{number} " + LONG, stream=number % 2 == 1)
                assert "kv_transfer_params" not in one
            elif kind == "direct":
                named = [each["kv_transfer_params"]["kvlane"]["handoff"] for each in (one, other)]
                assert named[0] == named[1]
                peer = other["kv_transfer_params"]["kvlane"]["peer"]
                (prefill,) = [
                    each for each in found.prefills if zmq_of(int(each.address.split(":")[1])) == peer
                ]
                met.add(prefill.address)
                assert one["kv_transfer_params"]["do_remote_decode"] is True
                assert other["kv_transfer_params"]["do_remote_prefill"] is True
            else:
                assert (
                    "kvlane" in other["kv_transfer_params"]
                    or other["kv_transfer_params"]["do_remote_prefill"]
                )
        if kind == "p2p-nccl":
            assert len(met) == 4, "each meets each"
        if kind == "direct":
            assert len(met) == 2, "the decode engines are told of either prefill engine"


def test_the_pair_of_the_page_hands_over_directly(tmp_path: Path) -> None:
    """docs/handoff.md's file, with ports that are free here in place of its own."""
    page = (Path(__file__).parents[2] / "docs/handoff.md").read_text()
    (file,) = re.findall(r"```toml\n(\[\[node\]\][^`]*)```", page)
    config = tmp_path / "pair.toml"
    with FakeEngine("--pairs", "direct") as prefill, FakeEngine("--pairs", "direct") as decode:
        for at, engine in (("http://127.0.0.1:8100", prefill), ("http://127.0.0.1:8200", decode)):
            assert file.count(at) == 1
            file = file.replace(at, engine.url)
        config.write_text(file)
        with Router("--config", str(config), nodes=2) as router:
            status, answer, _ = ask(router.address, COMPLETIONS, wanted())
            assert status == 200, answer
            (first,), (second,) = prefill.log(), decode.log()
    assert (first["leg"], second["leg"]) == ("prefill", "decode")
    assert json.loads(second["body"])["kv_transfer_params"]["kvlane"]["peer"] == "127.0.0.1:7100"


def test_direct_legs_run_at_the_same_time(tmp_path: Path) -> None:
    slow = ["--prefill-tokens-per-second", "100"]
    with pairs(tmp_path, "direct", (1, 1), prefill=slow, decode=["--ttft-ms", "3000"]) as found:
        client = connect(found.router.address)
        client.request("POST", COMPLETIONS, json.dumps(wanted()))

        def both() -> list[list[str]]:
            return [[seen["state"] for seen in each.log()] for each in found.prefills + found.decodes]

        until("both run", lambda: both() == [["running"], ["running"]])
        # The client leaves: both legs end.
        assert client.sock is not None
        client.sock.shutdown(socket.SHUT_RDWR)
        until("both are aborted", lambda: both() == [["aborted"], ["aborted"]])


@pytest.mark.parametrize(("shape", "kind"), [((1, 3), "nixl"), ((3, 1), "direct"), ((5, 2), "p2p-nccl")])
def test_all_are_served_while_engines_are_killed_and_come_back(
    tmp_path: Path, kind: str, shape: tuple[int, int]
) -> None:
    with pairs(tmp_path, kind, shape, prefill=["--ttft-ms", "2"], decode=["--itl-ms", "2"]) as found:
        statuses: list[tuple[int, Any]] = []
        over = threading.Event()

        def client(name: int) -> None:
            number = 0
            while not over.is_set():
                number += 1
                statuses.append(found.ask(f"{name} {number} " + LONG, max_tokens=5))

        clients = [threading.Thread(target=client, args=(name,)) for name in range(3)]
        [each.start() for each in clients]
        try:
            until("they are served", lambda: len(statuses) > 10)
            for engines, role in ((found.prefills, "prefill"), (found.decodes, "decode")):
                killed = engines[0]
                killed.kill(signal.SIGKILL)
                before = len(statuses)
                until("requests go on", lambda before=before: len(statuses) > before + 20)
                engines[0] = found.again(killed, role)
                until("it serves again", lambda engines=engines: engines[0].log())
        finally:
            over.set()
            [each.join() for each in clients]
        lost = [(status, answer) for status, answer in statuses if status != 200]
        assert not lost, lost[:3]


@pytest.mark.parametrize("kind", ["p2p-nccl", "direct"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_dies_amid_its_leg_is_replaced_before_the_first_byte(
    tmp_path: Path, kind: str, role: str
) -> None:
    with pairs(tmp_path, kind, (2, 2)) as found:
        dies = (found.prefills if role == "prefill" else found.decodes)[0]
        # A direct pair's other leg is under way then, and is cancelled.
        waits = found.decodes if role == "prefill" else found.prefills
        dies.faults(exit_at_chunk=0)
        for number in range(4):
            status, answer = found.ask(f"{number} " + LONG)
            assert status == 200, answer
        assert dies.process.poll() is not None, "the control: it died"
        assert "whole" not in legs([each for each in found.prefills + found.decodes if each is not dies])
        until(
            "nothing runs on",
            lambda: all(seen["state"] not in STATES for each in waits for seen in each.log()),
        )


def test_the_prefill_engine_may_die_when_its_leg_is_over(tmp_path: Path) -> None:
    with pairs(tmp_path, "nixl", (1, 1), decode=["--ttft-ms", "1500"]) as found:
        answers: list[tuple[int, Any]] = []
        client = threading.Thread(target=lambda: answers.append(found.ask()))
        client.start()
        until(
            "the decode leg runs", lambda: [seen["state"] for seen in found.decodes[0].log()] == ["running"]
        )
        found.prefills[0].kill(signal.SIGKILL)
        client.join()
        assert answers[0][0] == 200
        assert len(found.decodes[0].log()) == 1, "it was not begun anew"


def test_when_the_prefill_engine_dies_the_decode_engine_goes_on_and_its_answer_is_kept(
    tmp_path: Path,
) -> None:
    """The decode engine computes what does not land, but the router cancelled its leg and ran the request on another
    pair."""
    slow = ["--prefill-tokens-per-second", "50"]
    with pairs(tmp_path, "direct", (2, 1), prefill=slow, decode=["--ttft-ms", "2000"]) as found:
        answers: list[tuple[int, Any]] = []
        client = threading.Thread(target=lambda: answers.append(found.ask()))
        client.start()
        decode = found.decodes[0]
        until("both run", lambda: legs(found.prefills) == ["prefill"] and decode.log())
        dies = next(each for each in found.prefills if each.log())
        dies.kill(signal.SIGKILL)
        client.join()
        assert answers[0][0] == 200, answers
        assert [seen["state"] for seen in decode.log()] == ["done"], "it ran once"
        assert all(not each.log() for each in found.prefills if each is not dies), "nothing was begun anew"


def test_where_the_decode_engine_fails_too_another_pair_serves(tmp_path: Path) -> None:
    with pairs(tmp_path, "direct", (2, 2)) as found:
        for dies in (found.prefills[0], found.decodes[0]):
            dies.faults(exit_at_chunk=0)
        statuses = [found.ask(f"{number} " + LONG)[0] for number in range(4)]
        assert statuses == [200] * 4
        assert all(each.process.poll() is not None for each in (found.prefills[0], found.decodes[0]))


def test_a_decode_engine_that_gave_up_does_not_wait_for_a_prefill_engine_that_is_stuck(
    tmp_path: Path,
) -> None:
    """The router held the answer back until the prefill leg had ended."""
    slow = ["--prefill-tokens-per-second", "1"]
    with pairs(tmp_path, "direct", (1, 1), prefill=slow, decode=["--ttft-ms", "100"]) as found:
        assert found.ask()[0] == 200
        ended = [["aborted"], ["done"]]
        engines = found.prefills + found.decodes
        until(
            "nothing runs on",
            lambda: [[seen["state"] for seen in each.log()] for each in engines] == ended,
        )


def test_the_name_of_a_hand_off_cannot_be_guessed_from_another_one(tmp_path: Path) -> None:
    """The name was the router's run and a counter, which a client sees in the id of its own answer."""
    with pairs(tmp_path, "direct", (1, 1)) as found:
        names = []
        for number in range(2):
            assert found.ask(f"{number} " + LONG)[0] == 200
            (seen,) = found.decodes[0].log(clear=True)
            names.append(json.loads(seen["body"])["kv_transfer_params"]["kvlane"]["handoff"])
        ends = [re.fullmatch(r"kvlane-[0-9a-f]{12}-[0-9a-z]+-w0-([0-9a-f]{32})", name) for name in names]
        assert ends[0] is not None and ends[1] is not None, names
        assert ends[0][1] != ends[1][1]


@pytest.mark.parametrize("kind", ["p2p-nccl", "direct"])
def test_after_the_first_byte_the_client_sees_the_cut_and_both_engines_are_at_rest(
    tmp_path: Path, kind: str
) -> None:
    with pairs(tmp_path, kind, (1, 2), decode=["--itl-ms", "5"]) as found:
        for each in found.decodes:
            each.faults(die_at_chunk=3)
        with pytest.raises(Exception, match=r"IncompleteRead|reset|closed"):
            found.ask(stream=True)
        assert sum(len(each.log()) for each in found.decodes) == 1, "it is not begun anew"
        for each in found.decodes:
            each.faults()
        status, stream = found.ask("anew " + LONG, stream=True)
        assert status == 200 and words_of(stream)
        nodes = ask(found.router.admin, "/nodes")[1]["nodes"]
        assert [node["requests"] for node in nodes] == [0, 0, 0]


def test_a_p2p_nccl_engine_gets_nothing_without_addresses(tmp_path: Path) -> None:
    """vLLM's connector reads them of each request's id, and its engine ends where there are none."""
    with pairs(tmp_path, "p2p-nccl", (1, 1)) as found:
        unsplittable: tuple[dict[str, Any], ...] = ({"prompt_logprobs": 1}, {"use_beam_search": True})
        for more in unsplittable:
            assert found.ask(**more)[0] == 503
        assert ask(found.router.address, "/v1/embeddings", {"model": "fake", "input": "x"})[0] == 503
        assert found.ask("short")[0] == 200
        given = {"X-Request-Id": "___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2_x"}
        status, _, headers = ask(found.router.address, COMPLETIONS, wanted(), given)
        assert (status, headers["x-request-id"]) == (200, given["X-Request-Id"])
        ids = [seen["id"] for each in found.prefills + found.decodes for seen in each.log()]
        assert len(ids) == 4 and all("127.0.0.1" in each and "10.0.0" not in each for each in ids)


def test_engines_of_other_groups_and_kinds_are_no_pair(tmp_path: Path) -> None:
    with ExitStack() as stack:
        one = stack.enter_context(FakeEngine("--pairs", "nixl"))
        other = stack.enter_context(FakeEngine("--pairs", "nixl"))
        config = tmp_path / "route.toml"
        for more in ('group = "a"', 'connector = "direct"'):
            config.write_text(
                f'[[node]]\nurl = "{one.url}"\nrole = "prefill"\nconnector = "nixl"\n'
                f'[[node]]\nurl = "{other.url}"\nrole = "decode"\n{more}\n'
            )
            with Router("--config", str(config), nodes=2) as router:
                assert ask(router.address, COMPLETIONS, wanted())[0] == 200
            assert (legs([one]), legs([other])) == ([], ["whole"])
            other.log(clear=True)
