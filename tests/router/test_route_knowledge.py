"""`kvlane route` with a tokenizer and KV events: what it knows of prefixes, and that it says so where it does not."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports
from processes import run_kvlane, until
from routed import CHAT, COMPLETIONS, Router, ask

from kvlane.testing.fake_engine import FakeEngine

SPECIAL = ["<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} </s> {% endfor %}<|assistant|>"
BLOCK = 4
"""Tokens of a block."""


def words(first: int, count: int, space: str = " ") -> str:
    return space.join(f"w{first + place}" for place in range(count))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer", 0)


def write_tokenizer(folder: Path, shift: int, template: str | None = TEMPLATE) -> Path:
    """A tokenizer of whole words; another `shift` gives them other numbers."""
    folder.mkdir()
    vocabulary = {word: number for number, word in enumerate(SPECIAL)}
    vocabulary |= {f"w{number}": len(SPECIAL) + shift + number for number in range(2000)}
    added = [
        {"id": number, "content": word, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, word in enumerate(SPECIAL)
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"bos_token": "<s>", "eos_token": "</s>"} | (
        {} if template is None else {"chat_template": template}
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class Engine:
    """A fake engine that publishes events, at ports that stay its own when it is started again."""

    def __init__(self, tokenizer: Path, *flags: str) -> None:
        self.port, self.events, self.replay = free_ports(3)
        self._flags = [
            *("--words", str(tokenizer / "tokenizer.json"), "--block-size", str(BLOCK)),
            *("--port", str(self.port), "--kv-events-port", str(self.events)),
            *("--kv-replay-port", str(self.replay), *flags),
        ]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> FakeEngine:
        return FakeEngine(*self._flags)

    def source(self, replay: bool = True) -> str:
        given = f"{self.url}=tcp://127.0.0.1:{self.events}"
        return given + (f",replay=tcp://127.0.0.1:{self.replay}" if replay else "")


@contextmanager
def knowing(
    tokenizer: Path | None, engines: list[Engine], *flags: str, replay: bool = True, events: bool = True
) -> Iterator[Router]:
    given = [word for each in engines for word in ("--worker", each.url)]
    if events:
        given += [word for each in engines for word in ("--kv-events", each.source(replay))]
    if tokenizer is not None:
        given += ["--tokenizer", f"fake={tokenizer}"]
    with Router(*given, *flags, nodes=len(engines)) as router:
        yield router


def nodes(router: Router) -> list[dict[str, Any]]:
    return ask(router.admin, "/nodes")[1]["nodes"]


def metric(router: Router, name: str) -> float:
    """The sum of a metric's values; a name may have labels, up to any."""
    page = ask(router.admin, "/metrics")[1]
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


def complete(address: str, prompt: object, **more: object) -> dict[str, Any]:
    status, answer, _ = ask(
        address, COMPLETIONS, {"model": "fake", "prompt": prompt, "max_tokens": 1, **more}
    )
    assert status == 200, answer
    return answer


def decided(router: Router) -> dict[str, Any]:
    return ask(router.admin, "/decisions?limit=1")[1]["decisions"][0]


def stored(router: Router, blocks: int) -> None:
    """Waits for events. Those that are replayed count once the last of them is there."""
    until(
        f"{blocks} blocks are known",
        lambda: (
            sum(each["blocks_stored"] for each in nodes(router)) >= blocks
            and all(each["prefixes_reason"] != "events_lost" for each in nodes(router))
        ),
    )


@pytest.mark.parametrize("maps", [[], ["--kv-events-maps"]], ids=["arrays", "maps"])
def test_a_prefix_is_known_by_its_tokens(tokenizer: Path, maps: list[str]) -> None:
    """Complaint 44 (kthena 1535): events of vLLM 0.26 are maps."""
    engines = [Engine(tokenizer, *maps) for _ in range(2)]
    with ExitStack() as stack:
        first, second = (stack.enter_context(each.start()) for each in engines)
        # The router learns of this prompt by events only, because it did not route it.
        complete(second.address, words(0, 43))
        with knowing(tokenizer, engines) as router:
            stored(router, 10)
            # A first engine without blocks is known by texts, of which there are none.
            for given in (words(0, 43, "  \n"), [len(SPECIAL) + number for number in range(43)]):
                assert complete(router.address, given)["usage"]["prompt_tokens_details"] == {
                    "cached_tokens": 40
                }
                said = decided(router)
                assert (said["node"], said["prompt_tokens"], said["cached_tokens"]) == (
                    engines[1].url,
                    43,
                    40,
                )
            until("it is exact", lambda: nodes(router)[1]["prefixes"] == "exact")
            assert (nodes(router)[1]["block_size"], nodes(router)[1]["prefixes_reason"]) == (BLOCK, None)
            # A control: another salt, and so other blocks; the beginning alone decides.
            complete(router.address, words(0, 43), cache_salt="mine")
            assert decided(router)["cached_tokens"] == 0
            complete(router.address, "w1 " + words(0, 43))
            assert decided(router)["cached_tokens"] == 0
        assert len(first.log()) + len(second.log()) == 5


def test_chats_are_known_by_the_models_template(tokenizer: Path) -> None:
    """Complaint 30 (production-stack 1045, sglang 27386): chats were not known, or without their template."""
    engines = [Engine(tokenizer), Engine(tokenizer)]
    with ExitStack() as stack:
        for each in engines:
            stack.enter_context(each.start())
        with knowing(tokenizer, engines) as router:
            talk = [{"role": "system", "content": words(100, 30)}, {"role": "user", "content": words(200, 9)}]
            for turn in range(3):
                status, answer, _ = ask(
                    router.address, CHAT, {"model": "fake", "messages": talk, "max_tokens": 1}
                )
                assert status == 200
                used = answer["usage"]
                assert decided(router)["prompt_tokens"] == used["prompt_tokens"]
                if turn > 0:
                    assert (
                        decided(router)["cached_tokens"]
                        == used["prompt_tokens_details"]["cached_tokens"]
                        >= 40
                    )
                stored(router, used["prompt_tokens"] // BLOCK)
                talk += [
                    {"role": "assistant", "content": "w1"},
                    {"role": "user", "content": words(300 + turn, 9)},
                ]
            served = {each["node"] for each in ask(router.admin, "/decisions")[1]["decisions"]}
            assert len(served) == 1
            # A request without known text is served all the same, and counted.
            picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
            assert ask(router.address, CHAT, {"model": "fake", "messages": picture})[0] == 200
            assert metric(router, 'kvlane_route_knowledge_fallbacks_total{reason="request_form"}') == 1


def test_equal_prompts_meet_before_their_engine_tells_of_them(tokenizer: Path) -> None:
    engines = [Engine(tokenizer, "--prefill-tokens-per-second", "400") for _ in range(2)]
    with ExitStack() as stack:
        for each in engines:
            stack.enter_context(each.start())
        with knowing(tokenizer, engines) as router:
            for start in (0, 500):
                complete(router.address, words(start, 40))
            stored(router, 20)
            until("both are exact", lambda: all(each["prefixes"] == "exact" for each in nodes(router)))
            complete(router.address, words(1000, 40))
            complete(router.address, words(1000, 40))
            assert decided(router)["cached_tokens"] == 36


def test_evicted_and_cleared_blocks_are_gone(tokenizer: Path) -> None:
    engines = [Engine(tokenizer, "--cache-blocks", "20")]
    with engines[0].start() as engine, knowing(tokenizer, engines) as router:
        complete(router.address, words(0, 42))
        complete(router.address, words(500, 42))
        complete(router.address, words(1000, 42))
        until("ten blocks are gone", lambda: nodes(router)[0]["blocks_removed"] >= 10)
        # Control: what came last is there. By texts, or by promises, the first one would be, too.
        complete(router.address, words(1000, 42))
        assert decided(router)["cached_tokens"] == 40
        assert ask(engine.address, "/reset_prefix_cache", {})[0] == 200
        complete(engine.address, words(1500, 8))
        stored(router, 32)
        complete(router.address, words(1000, 42))
        assert decided(router)["cached_tokens"] == 0


def test_a_router_that_starts_later_learns_by_replay(tokenizer: Path) -> None:
    """Complaint 23 (llm-d-kv-cache 691): an empty index after the router has restarted."""
    engines = [Engine(tokenizer)]
    with engines[0].start():
        with knowing(tokenizer, engines) as router:
            complete(router.address, words(0, 42))
            stored(router, 10)
        with knowing(tokenizer, engines) as router:
            stored(router, 10)
            complete(router.address, words(0, 42))
            assert decided(router)["cached_tokens"] == 40
        # Without a replay nothing is known, and nothing is invented; what comes after unknown blocks is not attached.
        with knowing(tokenizer, engines, replay=False) as router:
            until("it listens", lambda: nodes(router)[0]["prefixes_reason"] == "block_size_unknown")
            complete(router.address, words(0, 50))
            until("events came", lambda: nodes(router)[0]["blocks_stored"] > 0)
            assert nodes(router)[0]["blocks_unattached"] > 0
            assert nodes(router)[0]["block_size"] is None


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "no-replay"])
def test_an_engine_that_starts_anew_has_nothing(tokenizer: Path, replay: bool) -> None:
    """Complaint 21 (llm-d-router 1736, 2853): a stale index after an engine's restart, also without a replay."""
    engines = [Engine(tokenizer)]
    with ExitStack() as stack:
        first = stack.enter_context(engines[0].start())
        router = stack.enter_context(knowing(tokenizer, engines, replay=replay))
        # Without a replay, the first events may come before the router listens.
        until("it listens", lambda: nodes(router)[0]["prefixes_reason"] == "block_size_unknown")
        for turn in range(5):
            complete(router.address, words(100 * turn, 42))
        until("blocks are known", lambda: nodes(router)[0]["prefixes"] == "exact")
        before = nodes(router)[0]["blocks_stored"]
        assert before > 0
        first.kill()
        until("it is lost", lambda: nodes(router)[0]["prefixes_reason"] == "events_lost")
        stack.enter_context(engines[0].start())
        until("all is forgotten", lambda: nodes(router)[0]["blocks_stored"] == 0)
        until("it is there", lambda: nodes(router)[0]["state"] == "ready")
        complete(router.address, words(1000, 42))
        until("it is known again", lambda: nodes(router)[0]["prefixes"] == "exact")
        complete(router.address, words(0, 42))
        assert decided(router)["cached_tokens"] == 0


def test_knowledge_that_is_off_is_not_silent(tokenizer: Path, tmp_path: Path) -> None:
    """Complaint 30: the router's idea of a prompt was not the engine's, all was green, and no prefix was ever hit."""
    other = write_tokenizer(tmp_path / "other", 0, TEMPLATE.replace("</s> ", "</s> </s> "))
    engines = [Engine(tokenizer)]

    def reason(router: Router) -> str | None:
        return nodes(router)[0]["prefixes_reason"]

    def said(router: Router, text: str) -> int:
        return sum(text in line for line in router.lines)

    with engines[0].start():
        with knowing(None, engines) as router:
            until("the tokenizer is missing", lambda: reason(router) == "no_tokenizer")
            assert said(router, "name it with --tokenizer") == 1
            # Token ids need none.
            for _ in range(2):
                complete(router.address, list(range(42)))
                stored(router, 10)
            assert decided(router)["cached_tokens"] == 40
        with knowing(tokenizer, engines, events=False) as router:
            until("events are missing", lambda: reason(router) == "no_events")
            assert (nodes(router)[0]["prefixes"], said(router, "name them with --kv-events")) == (
                "approximate",
                1,
            )
            for _ in range(4):
                complete(router.address, words(0, 42))
            # The engine's own counter agrees with the router, so its prefixes count as checked.
            assert (nodes(router)[0]["prefixes"], reason(router)) == ("checked", "no_events")
        with knowing(other, engines) as router:
            talk = {"model": "fake", "messages": [{"role": "user", "content": words(0, 42)}], "max_tokens": 1}
            for _ in range(4):
                assert ask(router.address, CHAT, talk)[0] == 200
            assert (nodes(router)[0]["prefixes"], reason(router)) == ("approximate", "tokens_differ")
            assert said(router, "counts other tokens") == 1
            assert metric(router, 'kvlane_route_knowledge_fallbacks_total{reason="tokens_differ"}') == 1
            # It goes by texts again, which are right.
            ask(router.address, CHAT, talk)
            assert decided(router)["cached_tokens"] > 30
        bare = write_tokenizer(tmp_path / "bare", 0, None)
        with knowing(bare, engines) as router:
            assert ask(router.address, CHAT, talk)[0] == 200
            assert metric(router, 'kvlane_route_knowledge_fallbacks_total{reason="no_template"}') == 1
            assert said(router, "there is no chat template") == 1


def test_what_others_send_to_an_engine_counts(tokenizer: Path) -> None:
    """Complaints 32 and 34: counters of the router's own stay, and engines are asked for metrics every 2 s only."""
    slow = ["--max-num-seqs", "1", "--prefill-tokens-per-second", "1"]
    engines = [Engine(tokenizer, *slow), Engine(tokenizer)]
    with ExitStack() as stack:
        for each in engines:
            stack.enter_context(each.start())
        with knowing(None, engines, events=False) as router:
            until("loads are known", lambda: metric(router, "kvlane_route_node_load_known") == 2)
            sockets = [
                stack.enter_context(socket.create_connection(("127.0.0.1", engines[0].port)))
                for _ in range(3)
            ]
            body = json.dumps({"model": "fake", "prompt": words(0, 40)})
            for each in sockets:
                head = (
                    f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                each.sendall((head + body).encode())
            until("others are seen", lambda: nodes(router)[0]["other_requests"] == 3)
            assert nodes(router)[0]["requests"] == 0
            for turn in range(4):
                complete(router.address, words(100 * turn, 40))
                assert decided(router)["node"] == engines[1].url
            for each in sockets:
                each.close()
            until("they are gone", lambda: nodes(router)[0]["other_requests"] == 0)


def test_flags_that_fit_nowhere_are_refused(tokenizer: Path, tmp_path: Path) -> None:

    for flags, named in (
        (["--tokenizer", f"fake={tmp_path / 'missing'}"], "missing"),
        (["--tokenizer", str(tokenizer)], "MODEL=PATH"),
        (["--kv-events", "http://127.0.0.1:2=tcp://127.0.0.1:3"], "no engine has this address"),
        (["--kv-events", "tcp://127.0.0.1:3"], "write it as"),
    ):
        ended = run_kvlane("route", "--worker", "http://127.0.0.1:1", *flags)
        assert ended.returncode != 0
        assert named in ended.stderr, ended.stderr


def test_a_hangup_while_a_tokenizer_loads_waits_for_it(tokenizer: Path) -> None:
    """It ended the router, which took its signals over only after it had loaded all tokenizers."""
    file = tokenizer / "tokenizer.json"
    text = file.read_text()
    file.unlink()
    os.mkfifo(file)
    with FakeEngine() as engine:
        router = Router("--worker", engine.url, "--tokenizer", f"fake={tokenizer}", nodes=1)

        def hang_up() -> None:
            # Open returns when the router reads.
            with file.open("w") as pipe:
                router.process.send_signal(signal.SIGHUP)
                pipe.write(text)

        threading.Thread(target=hang_up, daemon=True).start()
        with router:
            until("it reads again", lambda: any("configuration read again" in line for line in router.lines))
