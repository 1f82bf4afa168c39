"""`kvlane bench handoff` between real processes, tiny."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from kvlane.bench import handoff
from kvlane.bench.__main__ import main


def test_each_transport_is_measured_beside_a_bare_read(tmp_path: Path) -> None:
    shape = ["--layers", "3", "--blocks", "5", "--block-layer-bytes", "4k"]
    assert main(["handoff", *shape, "--rounds", "2", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "handoff.json").read_text())
    assert found["bytes"] == 3 * 5 * 4096
    # A first hand-off, and in each round one as a whole, one layer by layer, one at the end.
    moved = 7 * found["bytes"]
    for transport, other in (("cma", "tcp"), ("tcp", "cma")):
        counts = found["results"][transport]["counts"]
        assert (counts[f"{transport}_bytes"], counts[f"{other}_bytes"], counts["failed"]) == (moved, 0, 0)
        assert all(len(seconds) == 2 for seconds in found["results"][transport]["seconds"].values())
    assert len(found["figures"]) == 12 and (tmp_path / "handoff.png").exists()


def test_a_byte_that_did_not_land_is_found() -> None:
    parser = argparse.ArgumentParser()
    handoff.add_arguments(parser)
    shape = ["--layers", "3", "--blocks", "5", "--block-layer-bytes", "4k", "--contiguous"]
    pair = handoff._Pair("tcp", parser.parse_args(shape))
    try:
        pair.meet(parser.parse_args(shape))
        pair.whole(5)
        pair.check()
        pair.whole(6)
        pair.decode.ask("put", salt=7)
        with pytest.raises(SystemExit, match="something else"):
            pair.check()
    finally:
        pair.end()


def test_a_transport_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["handoff", "--transports", "pigeons"])
    assert "some of cma,tcp, not pigeons" in capsys.readouterr().err
