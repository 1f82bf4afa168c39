"""Clients of a router, some of which leave, and fake engines behind it that are killed and started again."""

from __future__ import annotations

import http.client
import json
import random
import secrets
import time

from day_loads import Loads, has
from processes import until
from routed import CHAT, COMPLETIONS, Router, ask, chat, connect, wanted

from kvlane.testing.fake_engine import FakeEngine

CLIENTS = 3
# Requests of a round, after which a client closes its connection and passes the gate.
ROUND = 10
PAUSE_S = 0.03
PROMPTS, FRESH, SAMPLED = 200, 0.2 if has("fresh") else 0.0, 0.25 if has("traces") else 0.0
ANSWER_TOKENS, LONG_ANSWER_TOKENS = 16, 400
KINDS = ("whole", "stream", "chat", "leaves")
# Seconds between two kills of an engine.
ENGINE_LIFE_S = (20.0, 60.0)


class Client:
    """Asks until the soak is over. Every second one keeps its connection for a round."""

    def __init__(self, router: Router, number: int, loads: Loads) -> None:
        self._address, self._number, self._loads = router.address, number, loads
        self._connection: http.client.HTTPConnection | None = None

    def run(self, dice: random.Random) -> None:
        while self._loads.gate.passes():
            for _ in range(ROUND):
                kind = dice.choice(KINDS)
                self._ask(kind, dice)
                if self._number % 2 == 0 or kind == "leaves":
                    self._close()
                time.sleep(PAUSE_S)
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _ask(self, kind: str, dice: random.Random) -> None:
        begun = False
        try:
            answer = self._send(kind, dice)
            begun = answer.status == 200
            if begun and kind == "leaves":
                answer.read(64)
                self._loads.count(clients_left=1)
                return
            text = answer.read()
            assert begun, f"a request was answered {answer.status}: {text[:200]!r}"
            is_whole = text.endswith(b"data: [DONE]\n\n") or kind == "whole"
            self._loads.count(**{"answers" if is_whole else "streams_cut": 1})
        except (OSError, http.client.HTTPException) as error:
            self._close()
            # The engine that streamed it is dead: no other one can go on.
            assert begun, f"a request was lost: {type(error).__name__}: {error}"
            self._loads.count(streams_cut=1)

    def _send(self, kind: str, dice: random.Random) -> http.client.HTTPResponse:
        said = secrets.token_hex(8) if dice.random() < FRESH else f"{int(PROMPTS * dice.random() ** 2)}"
        prompt = f"prompt {said}: " + f"words of {said}, " * dice.randrange(1, 150)
        tokens = LONG_ANSWER_TOKENS if kind == "leaves" else ANSWER_TOKENS
        made = chat if kind == "chat" else wanted
        body = made(prompt, max_tokens=tokens, stream=kind != "whole")
        headers = {"content-type": "application/json"}
        trace = dice.random()
        # Others have a trace that their client did not sample, or none.
        if trace < 2 * SAMPLED:
            flag = "01" if trace < SAMPLED else "00"
            headers["traceparent"] = f"00-{dice.getrandbits(128):032x}-{dice.getrandbits(64):016x}-{flag}"
        if self._connection is None:
            self._connection = connect(self._address)
        path = CHAT if kind == "chat" else COMPLETIONS
        self._connection.request("POST", path, json.dumps(body), headers)
        self._loads.count(router_requests=1, router_sampled=int(trace < SAMPLED))
        return self._connection.getresponse()


class EngineKills:
    """Kills one engine after the other, and starts it again at the same place."""

    def __init__(
        self, router: Router, flags: list[list[str]], engines: list[FakeEngine], loads: Loads
    ) -> None:
        self._router, self._flags, self.engines, self._loads = router, flags, engines, loads

    def run(self, dice: random.Random) -> None:
        turn = 0
        while self._loads.gate.waits(dice.uniform(*ENGINE_LIFE_S)):
            victim = turn % len(self.engines)
            turn += 1
            self.engines[victim].kill()
            self.engines[victim].__exit__()
            self.engines[victim] = FakeEngine(*self._flags[victim]).__enter__()
            until("both engines get requests", lambda: ready_nodes(self._router) == len(self.engines))
            self._loads.count(fake_engines_killed=1)


def ready_nodes(router: Router) -> int:
    try:
        _, page, _ = ask(router.admin, "/nodes")
    except (OSError, http.client.HTTPException):
        # On a busy machine the admin port may close a connection whose request it has not read within 2 s.
        return 0
    return sum(node["state"] == "ready" and not node["left_alone"] for node in page["nodes"])
