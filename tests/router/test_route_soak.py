"""Twenty minutes of a router whose engines are killed and restarted while clients attack it. Part of `make soak`."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hostile import Hostile
from ports import free_port
from processes import until
from routed import COMPLETIONS, Router, ask, connect, wanted

from kvlane.testing.fake_engine import FakeEngine

MINUTES = float(os.environ.get("KVLANE_TEST_MINUTES", "20"))
KILL_PERIOD_S = 3.0
CLIENTS = 4
ANSWER_TOKENS = 20


@dataclass
class Seen:
    """Observations of the honest clients, and the router's use of memory and files."""

    served: int = 0
    cut: int = 0
    """Streams that their engine left after the first byte."""
    lost: list[str] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 300)
def test_no_request_is_lost_while_engines_die_and_clients_attack(tmp_path: Path) -> None:
    key = secrets.token_hex(16)
    keys = tmp_path / "keys"
    keys.write_text(key + "\n")
    keys.chmod(0o600)
    ports = [free_port(), free_port()]
    flags = [["--port", str(port), "--itl-ms", "2"] for port in ports]
    workers = [word for port in ports for word in ("--worker", f"http://127.0.0.1:{port}")]
    engines = [FakeEngine(*each).__enter__() for each in flags]
    seen, over, hostile = Seen(), threading.Event(), None
    try:
        with Router(*workers, "--api-key-file", str(keys), nodes=2) as router:
            hostile = Hostile(router.address, key, body_bytes=58 << 20, strangers=1_000)
            clients = [
                threading.Thread(target=_client, args=(router.address, key, number, seen, over))
                for number in range(CLIENTS)
            ]
            with hostile:
                for each in clients:
                    each.start()
                try:
                    _kill_in_turns(router, flags, engines, seen)
                finally:
                    over.set()
                    for each in clients:
                        each.join()
            until("strangers are gone", lambda: _descriptors(router) < 100)
            seen.descriptors.append(_descriptors(router))
    finally:
        for engine in engines:
            engine.__exit__()
        print(json.dumps(_summary(seen, hostile), indent=1))
    assert not seen.lost, seen.lost[:10]
    assert seen.served > 100 * MINUTES
    quarter = len(seen.memory_mb) // 4
    early, late = seen.memory_mb[quarter : 2 * quarter], seen.memory_mb[-quarter:]
    assert statistics.median(late) < 1.2 * statistics.median(early) + 20, "the router's memory grows"


def _kill_in_turns(router: Router, flags: list[list[str]], engines: list[FakeEngine], seen: Seen) -> None:
    """Kills one engine, starts it again, and goes on with the other one once both serve."""
    ends = time.monotonic() + 60 * MINUTES
    turn = 0
    while time.monotonic() < ends:
        begun = time.monotonic()
        victim = turn % len(engines)
        turn += 1
        engines[victim].kill()
        engines[victim].__exit__()
        engines[victim] = FakeEngine(*flags[victim]).__enter__()
        until("both engines get requests", lambda: _ready(router) == len(engines))
        seen.memory_mb.append(_memory_mb(router))
        seen.descriptors.append(_descriptors(router))
        time.sleep(max(0.0, KILL_PERIOD_S - (time.monotonic() - begun)))


def _ready(router: Router) -> int:
    try:
        _, page, _ = ask(router.admin, "/nodes")
    except (OSError, http.client.HTTPException):
        # On a busy machine the admin port may close a connection whose request it has not read within 2 s.
        return 0
    return sum(node["state"] == "ready" and not node["left_alone"] for node in page["nodes"])


def _client(address: str, key: str, number: int, seen: Seen, over: threading.Event) -> None:
    turn = 0
    while not over.is_set():
        turn += 1
        is_stream = turn % 2 == 0
        body = wanted(f"client {number} asks {turn % 50} " * 20, max_tokens=ANSWER_TOKENS, stream=is_stream)
        begun = time.monotonic()
        connection = connect(address)
        has_begun = False
        try:
            connection.request("POST", COMPLETIONS, json.dumps(body), {"Authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            seen.waits_s.append(time.monotonic() - begun)
            has_begun = answer.status == 200
            text = answer.read()
            if answer.status != 200:
                seen.lost.append(f"{answer.status} {text[:200]!r}")
            elif is_stream and not text.endswith(b"data: [DONE]\n\n"):
                seen.lost.append(f"a stream without its end: {text[-100:]!r}")
            else:
                seen.served += 1
        except (OSError, http.client.HTTPException) as error:
            if has_begun:
                # The engine that streamed it is dead: no other one can go on.
                seen.cut += 1
            else:
                seen.lost.append(f"{type(error).__name__}: {error}")
        finally:
            connection.close()


def _memory_mb(router: Router) -> float:
    status = Path(f"/proc/{router.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def _descriptors(router: Router) -> int:
    return len(os.listdir(f"/proc/{router.process.pid}/fd"))


def _summary(seen: Seen, hostile: Hostile | None) -> dict[str, object]:
    waits = sorted(seen.waits_s) or [0.0]
    return {
        "minutes": MINUTES,
        "served": seen.served,
        "streams_cut_by_a_kill": seen.cut,
        "lost": len(seen.lost),
        "wait_ms": {
            "p50": round(1000 * waits[len(waits) // 2], 1),
            "p99": round(1000 * waits[len(waits) * 99 // 100], 1),
            "max": round(1000 * waits[-1], 1),
        },
        "memory_mb": seen.memory_mb[:: max(1, len(seen.memory_mb) // 10)],
        "descriptors": seen.descriptors[:: max(1, len(seen.descriptors) // 10)],
        "attacks": {} if hostile is None else {name: dict(count) for name, count in hostile.answers.items()},
    }
