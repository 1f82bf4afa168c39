"""The SSD file that a release wrote, kept in crates/ssd/tests/fixtures as the pages that are not empty.

`python tests/daemon/ssd_fixture.py VERSION` makes both files, with the kvlane that is installed; run it with a release.

- VERSION.pages: bytes of the SSD file (8), then for each page that is not zeros: its number (4), how many bytes come
  until only zeros follow (4), those bytes. Numbers are little-endian, pages have 4096 bytes.
- VERSION.blocks: for each block its hash (16) and its bytes (BLOCK_BYTES), which come from patterns.py, not from the
  tier.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path

from patterns import block_hash, content

FIXTURES = Path(__file__).resolve().parents[2] / "crates" / "ssd" / "tests" / "fixtures"
PROMPT = "kept from a release"
BLOCKS = 3
PIECE_BYTES = 512
BLOCK_BYTES = 2 * PIECE_BYTES
PAGE = 4096


def pack(data: bytes) -> bytes:
    packed = [struct.pack("<Q", len(data))]
    for number in range(len(data) // PAGE):
        used = data[number * PAGE : (number + 1) * PAGE].rstrip(b"\0")
        if used:
            packed += [struct.pack("<II", number, len(used)), used]
    return b"".join(packed)


def unpack(packed: bytes) -> bytes:
    data = bytearray(struct.unpack_from("<Q", packed)[0])
    at = 8
    while at < len(packed):
        number, length = struct.unpack_from("<II", packed, at)
        at += 8
        data[number * PAGE : number * PAGE + length] = packed[at : at + length]
        at += length
    return bytes(data)


def make(version: str) -> None:
    from processes import Daemon, Engine  # they need the installed kvlane, which unpacking does not

    with tempfile.TemporaryDirectory(prefix="kvlane-") as folder:
        path = Path(folder) / "blocks"
        daemon = Daemon(Path(folder), "--ssd", f"{path}:8mib")
        daemon.start()
        engine = Engine(daemon.address, "engine", piece_bytes=PIECE_BYTES)
        engine.wait_connected()
        assert engine.call("save", prompt=PROMPT, count=BLOCKS)["ok"]
        daemon.settle()
        engine.call("close")
        assert daemon.stop() == 0
        data = path.read_bytes()
    names = [block_hash(PROMPT, index) for index in range(BLOCKS)]
    FIXTURES.mkdir(exist_ok=True)
    (FIXTURES / f"{version}.pages").write_bytes(pack(data))
    (FIXTURES / f"{version}.blocks").write_bytes(
        b"".join(name + content(name, BLOCK_BYTES) for name in names)
    )
    assert unpack(pack(data)) == data


if __name__ == "__main__":
    make(sys.argv[1])
