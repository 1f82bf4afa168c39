"""Running recordings, and the traces that they write."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from processes import KVLANE, PATIENCE, Daemon, clean_environment, until


class Recording:
    """A running `kvlane record`, or `kvlane route record`."""

    def __init__(self, command: Sequence[str], file: Path, *flags: str) -> None:
        self.file = file
        command = [str(KVLANE), *command, str(file), *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
        )
        # The header is written once requests are recorded. The file is there before, and once a test read it then.
        until(
            "the recording has begun",
            lambda: self.process.poll() is not None or (file.exists() and file.stat().st_size > 0),
        )

    def wait(self) -> str:
        """What it printed, once it has ended."""
        out, errors = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, errors
        return out

    def end(self, number: signal.Signals = signal.SIGINT) -> Trace:
        self.process.send_signal(number)
        said = self.wait()
        trace = Trace(self.file)
        assert trace.header["is_complete"], said
        return trace


class Trace:
    def __init__(self, file: Path) -> None:
        header, *lines = [json.loads(line) for line in file.read_text().splitlines()]
        self.header: dict[str, Any] = header
        self.models = [line for line in lines if "timestamp" not in line]
        self.requests = [line for line in lines if "timestamp" in line]

    def blocks(self) -> int:
        return sum(len(expanded(each["hash_ids"])) for each in self.requests)

    def hits(self) -> int:
        return sum(each.get("ram_blocks", 0) + each.get("ssd_blocks", 0) for each in self.requests)


def expanded(ids: list[Any]) -> list[int]:
    return [
        block for each in ids for block in (range(each[0], each[1] + 1) if isinstance(each, list) else [each])
    ]


@contextlib.contextmanager
def recording(recorded: Daemon | Path, file: Path, *flags: str) -> Iterator[Recording]:
    """Records a daemon, or the router with this socket."""
    if isinstance(recorded, Daemon):
        made = Recording(["record", "--addr", recorded.address], file, *flags)
    else:
        made = Recording(["route", "record", "--socket", str(recorded)], file, *flags)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait(PATIENCE)
