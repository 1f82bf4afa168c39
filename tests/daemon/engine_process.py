"""An engine without a model, as a process of its own: a map of memory as its KV blocks, a scheduler's and a worker's
connection, and commands as JSON lines on stdin, each answered by a line on stdout.

    python engine_process.py ADDRESS NAME '{"save_method": "mapped", ...}'

A block is a K and a V piece, which lie in two halves of the memory, as vLLM's tensors do.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from patterns import NAMESPACE, TOKENS, block_hash, content, hashes

from kvlane import _core

PR_SET_DUMPABLE = 4
JUNK = b"\xee"

DEFAULTS: dict[str, Any] = {
    "save_method": "auto",
    "save_timeout_ms": 10_000.0,
    "lookup_timeout_ms": 10_000.0,
    "blocks": 256,
    "piece_bytes": 8192,
    "layout": "04" * 16,
    "namespace": NAMESPACE.hex(),
    "model": "pattern",
    "uid": None,
    "dumpable": None,
    "daemon_user": None,
    "crosses_hosts": True,
    "rank": 0,
    "workers": 1,
    "scheduler": True,
}


class EngineProcess:
    def __init__(self, address: str, name: str, options: dict[str, Any]) -> None:
        if options["uid"] is not None:
            os.setgroups([])
            os.setgid(options["uid"])
            os.setuid(options["uid"])
        if options["dumpable"] is not None:
            # Changing the user has cleared it.
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, options["dumpable"], 0, 0, 0)
        self.address = address
        self.blocks, self.piece = options["blocks"], options["piece_bytes"]
        self.memory = mmap.mmap(-1, 2 * self.blocks * self.piece)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        region = (base, self.piece, self.blocks, self.piece, [0, self.blocks * self.piece])
        self.hits: dict[int, _core.Hit] = {}
        self.jobs = 0
        self.requests = 0
        namespace = bytes.fromhex(options["namespace"])
        # Equal prompts of two namespaces have different bytes, so that a mix-up is seen.
        self.salt = b"" if namespace == NAMESPACE else namespace
        self.worker = _core.Worker(
            address,
            name,
            "kvlane tests",
            options["rank"],
            options["workers"],
            [(namespace, bytes.fromhex(options["layout"]), [region])],
            options["save_method"],
            options["save_timeout_ms"],
            daemon_user=options["daemon_user"],
        )
        self.rank = options["rank"]
        self.scheduler: _core.Scheduler | None = None
        if options["scheduler"]:
            groups = [(namespace, options["model"], TOKENS, 0)]
            timeout = options["lookup_timeout_ms"]
            self.scheduler = _core.Scheduler(
                *(address, name, "kvlane tests", groups, options["workers"], timeout, options["daemon_user"]),
                crosses_hosts=options["crosses_hosts"],
            )

    # The content of a block

    def _places(self, block: int) -> Iterator[slice]:
        for half in (0, self.blocks * self.piece):
            start = half + block * self.piece
            yield slice(start, start + self.piece)

    def _content(self, name: bytes) -> bytes:
        return content(self.salt + name, 2 * self.piece)

    def read(self, block: int) -> bytes:
        return b"".join(self.memory[place] for place in self._places(block))

    def write(self, block: int, data: bytes) -> None:
        for place, part in zip(self._places(block), (data[: self.piece], data[self.piece :]), strict=True):
            self.memory[place] = part

    def _junk(self, first: int, count: int) -> None:
        for half in (0, self.blocks * self.piece):
            start = half + first * self.piece
            self.memory[start : start + count * self.piece] = JUNK * (count * self.piece)

    # Commands. A `prompt` names a chain of blocks; `at` is the engine's first block id.

    def state(self) -> dict[str, Any]:
        scheduler = self.scheduler
        if scheduler is not None:
            scheduler.tick()
        return {
            "pid": os.getpid(),
            "worker": self.worker.connected,
            "scheduler": scheduler is not None and scheduler.connected,
            "boot": ((scheduler and scheduler.boot) or b"").hex(),
            "method": self.worker.method,
            "reason": self.worker.reason,
            "refusal": scheduler.refusal if scheduler else "",
        }

    def fill(self, prompt: str, count: int, first: int = 0, at: int = 0) -> None:
        for index, name in enumerate(hashes(prompt, first, count)):
            self.write(at + index, self._content(name))

    def save(
        self, prompt: str, count: int, first: int = 0, at: int = 0, fill: bool = True, junk: bool = True
    ) -> dict[str, Any]:
        """Saves, and as soon as the save ends gives the blocks to something else."""
        if fill:
            self.fill(prompt, count, first, at)
        parent = block_hash(prompt, first - 1) if first else b""
        self.jobs += 1
        ids = list(range(at, at + count))
        self.worker.save(self.jobs, [(0, parent, hashes(prompt, first, count), ids)])
        end = self._finished()
        if junk:
            self._junk(at, count)
        return end

    def hand_over(self, count: int, wait_ms: int) -> tuple[str, str, int, int]:
        """What another engine's `lookup` is given to wait for so many blocks that this one saves."""
        assert self.scheduler is not None
        return self.scheduler.engine_id, self.scheduler.run.hex(), count * TOKENS, wait_ms

    def lookup(
        self,
        prompt: str,
        count: int,
        handoff: tuple[str, str, int, int] | None = None,
        tokens_per_s: int = 0,
        number: int = 0,
        again: bool = False,
        traceparent: str = "",
    ) -> dict[str, Any]:
        assert self.scheduler is not None
        started = time.monotonic()
        named = None
        if handoff is not None:
            engine_id, run, tokens, wait_ms = handoff
            named = (engine_id, bytes.fromhex(run), tokens, wait_ms)
        # A core of the first release knows no numbers.
        numbered: dict[str, Any] = {"number": number, "again": again} if number else {}
        if traceparent:
            numbered["traceparent"] = traceparent
        asked = [hashes(prompt, 0, count)]
        self.scheduler.lookup_start("r", asked, 1 << 40, named, tokens_per_s, **numbered)
        hit = None
        while hit is None:
            hit = self.scheduler.lookup_poll("r", 100_000)
        if hit.tokens:
            self.hits[hit.lease] = hit
        seconds = time.monotonic() - started
        return {"tokens": hit.tokens, "lease": hit.lease, "boot": hit.boot.hex(), "seconds": seconds}

    def lookups(self, prompt: str, count: int, times: int, traceparent: str) -> int:
        """So many lookups, one after the other, whose leases are released: how many were hits."""
        hits = 0
        for _ in range(times):
            found = self.lookup(prompt, count, traceparent=traceparent)
            if found["tokens"]:
                hits += 1
                self.release(found["lease"])
        return hits

    def load(self, prompt: str, lease: int, at: int = 0, release: bool = True) -> dict[str, Any]:
        """Loads all blocks of a hit, over junk, and compares them."""
        assert self.scheduler is not None
        hit = self.hits[lease]
        count = hit.tokens // TOKENS
        self._junk(at, count)
        self.jobs += 1
        self.worker.load(self.jobs, hit.boot, [(0, list(range(at, at + count)), hit.pages(0, self.rank))])
        end = self._finished()
        names = enumerate(hashes(prompt, 0, count))
        wrong = [index for index, name in names if self.read(at + index) != self._content(name)]
        if release:
            self.release(lease)
        return {**end, "wrong": wrong if end["ok"] else []}

    def check(self, prompt: str, count: int, at: int = 0) -> dict[str, Any]:
        """Looks up and loads: how many blocks hit, and which of them hold wrong bytes."""
        found = self.lookup(prompt, count)
        if not found["tokens"]:
            return {"blocks": 0, "wrong": [], "ok": True, "detail": ""}
        end = self.load(prompt, found["lease"], at)
        return {
            "blocks": found["tokens"] // TOKENS,
            "wrong": end["wrong"],
            "ok": end["ok"],
            "detail": end["detail"],
        }

    def burst(self, prompts: int, count: int) -> int:
        """Starts so many lookups of other long prompts at once, and takes their answers: how many came."""
        assert self.scheduler is not None
        for number in range(1, prompts + 1):
            blocks = [number.to_bytes(8, "little") + block.to_bytes(8, "little") for block in range(count)]
            self.scheduler.lookup_start(f"burst-{number}", [blocks], 1 << 40, None, 0, number)
        answers = (
            self.scheduler.lookup_poll(f"burst-{number}", 60_000_000) for number in range(1, prompts + 1)
        )
        return sum(answer is not None for answer in answers)

    def serve(self, requests: list[tuple[str, int, int]], first_number: int = 1) -> int:
        """Serves requests as an engine does: (prompt, blocks, blocks of its answer). Looks each prompt up, saves what
        is missing, and reports the end. Returns how many blocks were hits."""
        hit_blocks = 0
        for number, (prompt, count, answer) in enumerate(requests, first_number):
            found = self.lookup(prompt, count, number=number)
            hits = found["tokens"] // TOKENS
            hit_blocks += hits
            if count + answer > hits:
                self.save(prompt, count + answer - hits, first=hits)
            if found["tokens"]:
                self.release(found["lease"])
            self.report(number, count * TOKENS, answer * TOKENS, prompt, count, answer)
        return hit_blocks

    def report(
        self,
        number: int,
        prompt_tokens: int,
        output_tokens: int,
        prompt: str = "",
        first: int = 0,
        count: int = 0,
        age_ms: int = 0,
    ) -> bool:
        """Reports a request's end; whether somebody records."""
        assert self.scheduler is not None
        lengths = (prompt_tokens, output_tokens, 0)
        self.scheduler.requests_ended([(number, lengths, age_ms, "", first, hashes(prompt, first, count))])
        # Answered after the report was taken, which has no answer that anybody waits for.
        assert self.scheduler.cancel_saves(0, 10_000.0)
        return self.scheduler.is_recorded

    def work(self, seed: int, seconds: float, prompts: int, count: int) -> dict[str, Any]:
        """Saves and loads at random for a while. Ends early for nobody: it is there to be killed."""
        dice = random.Random(seed)
        until = time.monotonic() + seconds
        done = {"saves": 0, "loads": 0, "wrong": [], "broken": []}
        while time.monotonic() < until:
            prompt, length = f"work-{dice.randrange(prompts)}", dice.randrange(1, count + 1)
            if dice.random() < 0.5:
                self.save(prompt, length)
                done["saves"] += 1
            else:
                end = self.check(prompt, length, at=count)
                done["loads"] += end["blocks"] > 0
                done["wrong"] += [f"{prompt}/{index}" for index in end["wrong"]]
                if not end["ok"]:
                    done["broken"].append(end["detail"])
        return done

    def mixed(
        self, seed: int, seconds: float, prompts: int, count: int, fresh: float, sampled: float, pause: float
    ) -> dict[str, Any]:
        """Serves requests for a while, as an engine does: looks a prompt up, loads and compares what is there, saves
        the rest with an answer's blocks, and reports the end. Shares of the requests have a `fresh` prompt, which
        nobody asks for again, and a `sampled` trace."""
        dice = random.Random(seed)
        until = time.monotonic() + seconds
        numbers = dict.fromkeys(
            (
                "requests",
                "sampled",
                "fresh",
                "looked_up_blocks",
                "loads",
                "loaded_blocks",
                "saves",
                "unsaved",
            ),
            0,
        )
        wrong: list[str] = []
        broken: list[str] = []
        while time.monotonic() < until:
            is_fresh, is_sampled = dice.random() < fresh, dice.random() < sampled
            # Few prompts are asked for often, as in production.
            prompt = f"fresh-{dice.getrandbits(64)}" if is_fresh else f"p{int(prompts * dice.random() ** 2)}"
            length, answer = dice.randrange(1, count + 1), dice.randrange(0, 3)
            trace = f"00-{dice.getrandbits(128):032x}-{dice.getrandbits(64):016x}-01" if is_sampled else ""
            self.requests += 1
            found = self.lookup(prompt, length, number=self.requests, traceparent=trace)
            hits = found["tokens"] // TOKENS
            if hits:
                end = self.load(prompt, found["lease"], at=count + 2)
                numbers["loads"] += 1
                numbers["loaded_blocks"] += hits
                wrong += [f"{prompt}/{index}" for index in end["wrong"]]
                if not end["ok"]:
                    broken.append(end["detail"])
            if length + answer > hits:
                numbers["saves"] += 1
                numbers["unsaved"] += not self.save(prompt, length + answer - hits, first=hits)["ok"]
            self.report(self.requests, length * TOKENS, answer * TOKENS, prompt, length, answer)
            numbers["requests"] += 1
            numbers["sampled"] += is_sampled
            numbers["fresh"] += is_fresh
            numbers["looked_up_blocks"] += length
            time.sleep(pause)
        return {**numbers, "wrong": wrong, "broken": broken}

    def cancel(self, timeout_ms: float) -> bool:
        """As before a reset of vLLM's cache: no save of so far may become a block any more."""
        assert self.scheduler is not None
        return self.scheduler.cancel_saves(self.jobs, timeout_ms)

    def release(self, lease: int) -> None:
        assert self.scheduler is not None
        hit = self.hits.pop(lease)
        self.scheduler.release(hit.boot, hit.lease)

    def cut(self, how: str, freeze: bool = False) -> int:
        """Breaks the connections to the daemon without ending the process. `garbage`: the daemon hangs up.
        With `freeze` the process stops itself before it can connect again, until it gets SIGCONT."""
        path = self.address.removeprefix("unix:")
        cut = 0
        for number in map(int, os.listdir("/proc/self/fd")):
            try:
                connection = socket.socket(fileno=os.dup(number))
            except OSError:
                continue
            with connection, contextlib.suppress(OSError):
                if connection.family == socket.AF_UNIX and connection.getpeername() == path:
                    if how == "garbage":
                        connection.send(b"\xff" * 8)
                    else:
                        connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
        if freeze:
            os.kill(os.getpid(), signal.SIGSTOP)
        return cut

    def close(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
        self.worker.close()

    def _finished(self) -> dict[str, Any]:
        """The end of the one job under way. Polls once, as an engine does in a step."""
        ended = self.worker.wait(60_000)
        jobs = self.worker.poll()
        assert ended and [job.job for job in jobs] == [self.jobs], f"job {self.jobs}: {jobs}"
        job = jobs[0]
        return {
            "ok": job.ok,
            "blocks": job.blocks,
            "present": job.present,
            "bytes": job.bytes,
            "seconds": job.seconds,
            "detail": job.detail,
        }


def main() -> None:
    address, name, options = sys.argv[1:]
    engine = EngineProcess(address, name, {**DEFAULTS, **json.loads(options)})
    print(json.dumps({"answer": engine.state()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        call = getattr(engine, command.pop("do"))
        try:
            answer = {"answer": call(**command)}
        except Exception as error:  # noqa: BLE001 - told to the test, which fails
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
