"""`kvlane route` as a child process, before fake engines, and a client that speaks to both."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from processes import KVLANE, PATIENCE, until

from kvlane.testing.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# Long enough to be prefilled apart.
LONG = "Of ships and harbours, and of the sea in between. " * 40


class Router:
    """`kvlane route` while the context lasts; the flags' engines have to answer before it counts as started."""

    def __init__(self, *flags: str, nodes: int, log: str = "info,kvlane_router=debug") -> None:
        self._flags, self._nodes, self._log = flags, nodes, log
        self.address = ""
        self.admin = ""
        self.lines: list[str] = []

    def __enter__(self) -> Router:
        command = [
            str(KVLANE),
            "route",
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
            "--log",
            self._log,
            *([] if "--socket" in self._flags else ["--socket", "off"]),
            *self._flags,
        ]
        # Tests that wait for the delay at SIGTERM give the flag, which overrides this.
        environment = {**os.environ, "KVLANE_ROUTE_DRAIN_DELAY": "0"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            listens = re.compile(r"routes at http://(\S+?):? ")
            found = until("it listens", lambda: self._ended() or self._seen(listens))
            self.address = found[1]
            admin = self._seen(re.compile(r"decisions at http://(\S+)"))
            assert admin is not None
            self.admin = admin[1]
            ready = re.compile("node ready")
            until(
                "its nodes are ready",
                lambda: sum(bool(ready.search(line)) for line in self.lines) >= self._nodes,
            )
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(PATIENCE)
        panics = [line for line in self.lines if "panicked" in line]
        assert not panics, panics

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip("\n")))

    def _seen(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return next(filter(None, map(pattern.search, list(self.lines))), None)

    def _ended(self) -> None:
        assert self.process.poll() is None, "\n".join(self.lines)


@contextmanager
def routed(
    *engines: list[str], roles: str | None = None, flags: tuple[str, ...] = ()
) -> Iterator[tuple[Router, list[FakeEngine]]]:
    """A router before one fake engine for each list of flags. `roles` has a letter for each: w, p or d."""
    with ExitStack() as stack:
        started = [stack.enter_context(FakeEngine(*each)) for each in engines]
        names = {"w": "--worker", "p": "--prefill", "d": "--decode"}
        letters = roles or "w" * len(engines)
        named = [
            word for letter, each in zip(letters, started, strict=True) for word in (names[letter], each.url)
        ]
        yield stack.enter_context(Router(*named, *flags, nodes=len(started))), started


def connect(address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(address, timeout=PATIENCE)


def ask(
    address: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    """Status, answer (JSON is read) and headers, over a connection of its own."""
    connection = connect(address)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, headers or {})
        answer = connection.getresponse()
        read = answer.read()
        given = {name.lower(): value for name, value in answer.getheaders()}
        is_json = given.get("content-type", "").startswith("application/json")
        return answer.status, json.loads(read) if read and is_json else read.decode(), given
    finally:
        connection.close()


def wanted(prompt: str = LONG, **more: object) -> dict[str, Any]:
    return {"model": "fake", "prompt": prompt, **more}


def chat(prompt: str = LONG, **more: object) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": prompt}], **more}


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def words_of(stream: str) -> str:
    """The text of a stream, which has to have its end."""
    lines = stream.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], stream
    choices = [json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-2]]
    return "".join(
        each[0]["delta"].get("content", "") if "delta" in each[0] else each[0]["text"]
        for each in choices
        if each
    )
