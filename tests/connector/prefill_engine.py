"""An engine in a process of its own that computes prompts for others, step by step as the test says."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from direct_pair import interrupt, landed_blocks
from engine import InProcessEngine, prompt
from trainer import retrain, retrain_amid_requests

from kvlane.testing import FakeCore

STORE = "in the engine's process"
"""A daemon that an engine with the address `fake:` and this has for itself."""
START_SECONDS = 180
ANSWER_SECONDS = 60
CHUNK = 96
# <sched.h>
CLONE_NEWNET = 0x40000000


class PrefillEngine:
    """The test's view of it."""

    def __init__(
        self,
        model: Path,
        address: str,
        extra: Mapping[str, object],
        lay_wire: Callable[[int], None] | None = None,
        **arguments: Any,
    ) -> None:
        """`lay_wire`: the engine is in a network namespace of its own, to which this lays a wire; it gets the pid."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = {"extra": dict(extra), "max_num_batched_tokens": CHUNK, **arguments}
        self.process = context.Process(
            target=_serve, args=(theirs, model, address, arguments, lay_wire is not None), daemon=True
        )
        self.process.start()
        theirs.close()
        if lay_wire is not None:
            lay_wire(self._answer(START_SECONDS))
            self._pipe.send("the wire is there")
        self.address = self._answer(START_SECONDS)
        """For direct hand-offs."""

    def _answer(self, seconds: float = ANSWER_SECONDS) -> Any:
        if not self._pipe.poll(seconds):
            raise AssertionError(f"the prefill engine does not answer within {seconds} s")
        return self._pipe.recv()

    def ask(self, command: str, *arguments: Any) -> Any:
        """Have it do something, and wait for its answer."""
        self._pipe.send((command, *arguments))
        return self._answer()

    def run_a_step(self) -> None:
        """An idle engine makes no step: with its next request it takes note of what has ended. Nothing is reset."""
        self.ask("add", prompt(98, 40), 1)
        self.ask("answers")

    def signal(self, number: signal.Signals) -> None:
        """To its process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """End it."""
        if self.process.is_alive():
            self._pipe.send(("end",))
            self.process.join(ANSWER_SECONDS)
        self.kill()


def _serve(pipe: Connection, model: Path, address: str, arguments: dict[str, Any], elsewhere: bool) -> None:
    if elsewhere:
        _leave_network()
        pipe.send(os.getpid())
        pipe.recv()
    engine = InProcessEngine(model, address, **arguments)
    pipe.send(engine.scheduler.connector._scheduler.direct.address)
    while True:
        command, *said = pipe.recv()
        if command == "end":
            engine.close()
            return
        pipe.send(_COMMANDS[command](engine, *said))


def _leave_network() -> None:
    """Into a network namespace of this process's own. All threads that start later are in it too."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _prefill(engine: InProcessEngine, asked: list[int], params: dict[str, object]) -> str:
    return engine.add(asked, 1, params)


def _step(engine: InProcessEngine) -> bool:
    """A step; whether a request is left."""
    engine.llm.llm_engine.step()
    return engine.llm.llm_engine.has_unfinished_requests()


def _finish(engine: InProcessEngine) -> object:
    """All requests to their end; what the last one's answer says to the engine that goes on."""
    outputs = engine.run()
    (last,) = list(outputs.values())[-1:]
    return last.kv_transfer_params


def _generate(engine: InProcessEngine, asked: list[int], tokens: int) -> list[int]:
    answer = engine.generate(asked, tokens)[0]
    assert engine.llm.reset_prefix_cache()
    return answer


def _answers(engine: InProcessEngine) -> dict[str, tuple[list[int], int]]:
    """All requests to their end: of each the generated tokens, and how many of its prompt came from a cache."""
    outputs = engine.run()
    return {
        name: (list(output.outputs[0].token_ids), output.num_cached_tokens)
        for name, output in outputs.items()
    }


def _reset(engine: InProcessEngine) -> bool:
    return engine.llm.reset_prefix_cache()


_COMMANDS: dict[str, Any] = {
    "add": InProcessEngine.add,
    "answers": _answers,
    "prefill": _prefill,
    "step": _step,
    "finish": _finish,
    "generate": _generate,
    "reset": _reset,
    "retrain": retrain,
    "retrain_amid_requests": retrain_amid_requests,
    "interrupt": interrupt,
    "corrupt_store": lambda engine: FakeCore.named(STORE).corrupt(),
    "landed_blocks": landed_blocks,
    "preemptions": lambda engine: engine.metric("vllm:num_preemptions"),
    "books": InProcessEngine.books,
    "counted": lambda engine: dict(engine.counted),
    "errors": InProcessEngine.errors,
}
