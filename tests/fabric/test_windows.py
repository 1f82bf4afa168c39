"""Windows of kvlane.fabric: what one peer may read, until they are closed."""

from __future__ import annotations

import pytest

from kvlane import fabric

PATIENCE = 30.0


@pytest.mark.parametrize("transport", ["tcp", "cma"])
def test_a_peer_reads_what_a_window_shows_until_it_is_closed(transport: str) -> None:
    with fabric.Engine(transport=transport) as owner, fabric.Engine(transport=transport) as reader:
        memory = bytearray(range(256)) * 16
        region = owner.register(memory, windows_only=True)
        mine = bytearray(4096)
        local = reader.register(mine)
        peer = reader.connect(owner.describe())
        assert peer.regions == []
        with owner.open_window(reader.id, [(region, 100, 10), (region.number, 7, 3)]) as window:
            assert window.length == 13
            peer.read_window(local, window.descriptor, [(5, 8, 4)]).wait(PATIENCE)
            assert bytes(mine[5:9]) == bytes([108, 109, 7, 8])
            with pytest.raises(ValueError, match="13 bytes"):
                peer.read_window(local, window.descriptor, [(0, 8, 6)])
            with pytest.raises(ValueError, match="not registered"):
                peer.read(local, region.number, [(0, 0, 1)])
        with pytest.raises(fabric.Refused):
            read(peer, local, window.descriptor)
        with pytest.raises(KeyError, match="not open"):
            window.close()


def test_a_window_of_another_engine_is_refused() -> None:
    with fabric.Engine() as owner, fabric.Engine() as reader, fabric.Engine() as other:
        region = owner.register(bytearray(64))
        window = owner.open_window(other.id, [(region, 0, 64)])
        local = reader.register(bytearray(64))
        with pytest.raises(fabric.Refused):
            read(reader.connect(owner.describe()), local, window.descriptor)
        theirs = other.register(bytearray(64))
        read(other.connect(owner.describe()), theirs, window.descriptor)
        region.unregister()
        with pytest.raises(KeyError):
            window.close()


def test_what_is_no_window_is_told_before_anything_moves() -> None:
    with fabric.Engine() as owner:
        region = owner.register(bytearray(64))
        for ranges in ([], [(region, 0, 0)], [(region, 60, 5)], [(99, 0, 1)]):
            with pytest.raises(ValueError, match="window"):
                owner.open_window(owner.id, ranges)
        peer = owner.connect(owner.describe())
        with pytest.raises(ValueError, match="not a window's descriptor"):
            peer.read_window(region, b"something", [(0, 0, 1)])
        with pytest.raises(ValueError, match="version 9"):
            peer.read_window(region, b"KVFW\x09" + bytes(19), [(0, 0, 1)])


def read(peer: fabric.Peer, local: fabric.Region, window: bytes) -> None:
    # Whether the peer has told by now that it is closed, decides where this fails.
    try:
        transfer = peer.read_window(local, window, [(0, 0, 1)])
    except ValueError as error:
        raise fabric.Refused(str(error)) from None
    transfer.wait(PATIENCE)
