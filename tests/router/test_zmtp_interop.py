"""crates/zmtp and libzmq, as pyzmq has it, talk to each other over loopback."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_MS = 30_000
Echo = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def program() -> Path:
    """crates/zmtp/examples/echo.rs, built."""
    wanted = ("-p", "kvlane-zmtp", "--example", "echo")
    command = ("cargo", "build", "--locked", "--offline", *wanted, "--message-format", "json")
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    (path,) = (m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == "echo")
    return Path(path)


@pytest.fixture
def echo(program: Path) -> Iterator[Echo]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen((program, *arguments), stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def socket(context: zmq.Context, kind: int) -> zmq.Socket:
    """One whose waits end."""
    made = context.socket(kind)
    made.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    made.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
    return made


def bound(context: zmq.Context, kind: int) -> tuple[zmq.Socket, str]:
    made = socket(context, kind)
    return made, f"127.0.0.1:{made.bind_to_random_port('tcp://127.0.0.1')}"


def line(process: subprocess.Popen[str]) -> list[bytes]:
    """The frames of the next line; empty once the process has ended."""
    assert process.stdout is not None
    return [b"" if word == "-" else bytes.fromhex(word) for word in process.stdout.readline().split()]


def test_a_listener_hears_dealers_and_reqs(echo: Echo, context: zmq.Context) -> None:
    listener = echo("listen")
    assert listener.stdout is not None
    address = listener.stdout.readline().split()[1]
    dealer = socket(context, zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, b"10.0.0.1:21001")
    dealer.setsockopt(zmq.HEARTBEAT_IVL, 50)
    dealer.connect(f"tcp://{address}")
    for frames in ([b"ping"], [b"", b"hello"], [b"x" * 60_000], [b"", b"", b"y" * 255, b"z" * 256]):
        dealer.send_multipart(frames)
        assert line(listener) == [b"10.0.0.1:21001", *frames]
    req = socket(context, zmq.REQ)
    req.connect(f"tcp://{address}")
    req.send(b"ask")
    identity, *frames = line(listener)
    assert (len(identity), identity[:1], frames) == (5, b"\0", [b"", b"ask"])


@pytest.mark.parametrize("kind", [zmq.PUB, zmq.XPUB])
def test_a_subscriber_receives_its_topic_and_no_other(echo: Echo, context: zmq.Context, kind: int) -> None:
    publisher, address = bound(context, kind)
    subscriber = echo("subscribe", address, "kv@")
    if kind == zmq.XPUB:
        assert publisher.recv() == b"\x01kv@"
        publisher.send_multipart([b"other", b"not for us"])
        publisher.send_multipart([b"kv@pod", (7).to_bytes(8, "big"), b"p" * 50_000])
        assert line(subscriber) == [b"kv@pod", (7).to_bytes(8, "big"), b"p" * 50_000]
        subscriber.kill()
        assert publisher.recv() == b"\x00kv@"
        return
    # A PUB tells nobody when a subscription has come: publish until one message was heard.
    monitor = zmq.Poller()
    monitor.register(subscriber.stdout, zmq.POLLIN)
    for _ in range(PATIENCE_MS // 10):
        publisher.send_multipart([b"other", b"not for us"])
        publisher.send_multipart([b"kv@pod", b"payload"])
        if monitor.poll(10):
            break
    assert line(subscriber) == [b"kv@pod", b"payload"]


def test_a_dealer_has_a_router_replay(echo: Echo, context: zmq.Context) -> None:
    router, address = bound(context, zmq.ROUTER)
    asking = echo("ask", address, "-", (5).to_bytes(8, "big").hex())
    identity, *question = router.recv_multipart()
    assert question == [b"", (5).to_bytes(8, "big")]
    answers = [
        (number.to_bytes(8, "big", signed=True), payload) for number, payload in ((5, b"five"), (-1, b""))
    ]
    for number, payload in answers:
        router.send_multipart([identity, b"", number, payload])
        assert line(asking) == [b"", number, payload]
