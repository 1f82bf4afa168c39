"""Engines of a daemon that save, look up, load and compare, and that die and come again, in namespaces that change."""

from __future__ import annotations

import random
import threading
import time

from day_loads import Loads, has
from processes import Daemon, Engine

# An engine for each way to save.
METHODS = ("process_vm", "mapped", "auto")
# A prompt of so many blocks at most, and so many prompts of each namespace: more than the pool and the SSD hold.
BLOCKS, PROMPTS = 24, 200
PIECE_BYTES = 2048
ROUND_S = 1.0
LIFE_S = (6.0, 24.0) if has("kills") else (1e9, 1e9)
FRESH, SAMPLED, PAUSE_S = 0.2 if has("fresh") else 0.0, 0.25 if has("traces") else 0.0, 0.02
REQUEST = {"prompts": PROMPTS, "count": BLOCKS, "fresh": FRESH, "sampled": SAMPLED, "pause": PAUSE_S}
NAMESPACES = 3
# After so many lives, on average, a namespace goes.
LIVES_OF_A_NAMESPACE = 8


class Namespaces:
    """Those in use. One that goes is dropped, or left to be evicted."""

    def __init__(self, daemon: Daemon, loads: Loads) -> None:
        self._daemon, self._loads = daemon, loads
        self._lock = threading.Lock()
        self._made = 0
        self._used = [self._new() for _ in range(NAMESPACES)]

    def _new(self) -> bytes:
        self._made += 1
        return b"soak-day" + self._made.to_bytes(8, "big")

    def take(self, dice: random.Random) -> bytes:
        """One for a life of an engine. May first replace one by a new one."""
        gone = None
        with self._lock:
            if has("namespaces") and dice.random() < NAMESPACES / LIVES_OF_A_NAMESPACE:
                at = dice.randrange(NAMESPACES)
                gone, self._used[at] = self._used[at], self._new()
            taken = dice.choice(self._used)
        if gone is not None:
            is_dropped = dice.random() < 0.5 and self._drop(gone)
            self._loads.count(namespaces_gone=1, namespaces_dropped=int(is_dropped))
        return taken

    def _drop(self, namespace: bytes) -> bool:
        """False if no engine has used it yet, and the daemon does not know it."""
        try:
            self._daemon.drop(namespace)
        except ValueError:
            return False
        return True


class EngineLives:
    """The lives of one engine, one after the other, each a process with a name of its own, as pods have."""

    def __init__(self, daemon: Daemon, number: int, namespaces: Namespaces, loads: Loads) -> None:
        self._daemon, self._number, self._namespaces, self._loads = daemon, number, namespaces, loads

    def run(self, dice: random.Random) -> None:
        life = 0
        while not self._loads.gate.is_over:
            life += 1
            self._live(f"engine-{self._number}-{life}", dice)

    def _live(self, name: str, dice: random.Random) -> None:
        engine = Engine(
            self._daemon.address,
            name,
            save_method=METHODS[self._number % len(METHODS)],
            namespace=self._namespaces.take(dice).hex(),
            blocks=2 * (BLOCKS + 2),
            piece_bytes=PIECE_BYTES,
        )
        try:
            engine.wait_connected()
            ends = time.monotonic() + dice.uniform(*LIFE_S)
            while time.monotonic() < ends:
                # Only engines that are connected wait at the gate, so their number is always the same there.
                if not self._loads.gate.passes():
                    break
                self._take(name, engine.call("mixed", seed=dice.getrandbits(32), seconds=ROUND_S, **REQUEST))
            self._end(engine, dice)
        finally:
            engine.kill()

    def _take(self, name: str, done: dict[str, object]) -> None:
        wrong, broken = done.pop("wrong"), done.pop("broken")
        assert not wrong, f"{name} loaded wrong bytes: {wrong}"
        assert not broken, f"{name} lost promised loads: {broken}"
        self._loads.count(**{f"engine_{name}": int(str(number)) for name, number in done.items()})

    def _end(self, engine: Engine, dice: random.Random) -> None:
        how = dice.choice(("closed", "killed_at_rest", "killed_at_work"))
        if how == "closed":
            engine.close()
        elif how == "killed_at_work":
            engine.send("mixed", seed=dice.getrandbits(32), seconds=ROUND_S, **REQUEST)
            time.sleep(dice.random() * ROUND_S)  # the moment of the kill is what is varied
        engine.kill()
        self._loads.count(**{f"engines_{how}": 1})
