"""Where engine tests keep their blocks: a daemon, or the in-process fake, whose faults come when a test wants them."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from busy import stretched

from kvlane.testing import FakeCore

_numbers = itertools.count()


class FakeStore:
    """Everything happens at once, and faults can be switched on."""

    def __init__(self) -> None:
        name = f"store-{next(_numbers)}"
        self.address = f"fake:{name}"
        self.core = FakeCore.named(name)

    def settle(self) -> None:
        """What was saved can be found."""

    def block_count(self) -> int:
        return self.core.block_count()

    def lease_count(self) -> int:
        return len(self.core.leases)

    def corrupt(self) -> None:
        assert self.core.corrupt() > 0

    def restart(self) -> None:
        self.core.restart()

    def close(self) -> None:
        self.core.release_held()


class DaemonStore:
    """`kvlane serve`, from PATH, on a socket of its own."""

    POOL_BYTES = 256 << 20

    def __init__(self, folder: Path, *flags: str) -> None:
        self.address = f"unix:{folder / 'kvlane.sock'}"
        self._flags = flags
        self._log = (folder / "daemon.log").open("a")
        self.start()

    def start(self) -> None:
        from kvlane import _core

        command = ["kvlane", "serve", "--pool-size", str(self.POOL_BYTES), "--listen", self.address]
        # Without the scrub, which would drop the blocks that a test corrupts.
        command += ["--http", "127.0.0.1:0", "--hugepages", "off", "--scrub-rate", "0", *self._flags]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        # vLLM's workers of another test may spin on all processors: a daemon once took 101 s to start beside them.
        deadline = time.monotonic() + stretched(60)
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self._tool: Any = _core.Tool(self.address, 10_000.0)
                return
            except (ConnectionError, TimeoutError):
                # Not listening yet; wait a moment, or for its end.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.05)
        self._process.kill()
        raise AssertionError(f"kvlane serve did not listen at {self.address}; its log is {self._log.name}")

    def settle(self) -> None:
        self._tool.settle(10_000)

    def block_count(self) -> int:
        return int(self._tool.status()["blocks"])

    def is_all_on_ssd(self) -> bool:
        """Whether a kill loses nothing."""
        status = self._tool.status()
        return status["ssd_blocks"] >= status["blocks"]

    def drop_all(self) -> None:
        """Forget every block."""
        self.settle()
        self._tool.drop_namespaces([each["namespace"] for each in self._tool.status()["namespaces"]])

    def lease_count(self) -> int:
        return int(self._tool.status()["leased_blocks"])

    def corrupt(self) -> None:
        used = int(self._tool.status()["used_bytes"])
        assert used > 0
        step = 1 << 20
        for offset in range(0, min(self.POOL_BYTES, 8 * used + (64 << 20)), step):
            self._tool.write_pool(offset, bytes(step))

    def stop(self) -> None:
        """It lives, and does not answer."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._tool.close()
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        self._tool.close()
        # A test that fails while the daemon is stopped must tell of its own failure, not of a daemon that does not end.
        self.resume()
        self._process.terminate()
        assert self._process.wait(stretched(20)) == 0
        self._log.close()
