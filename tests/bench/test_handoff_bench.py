"""`kvlane bench handoff` between real processes, tiny."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from kvlane.bench import handoff
from kvlane.bench.__main__ import main


def test_each_transport_is_measured_beside_a_bare_read(tmp_path: Path) -> None:
    shape = ["--layers", "3", "--blocks", "5", "--block-layer-bytes", "4k", "--layer-ms", "2"]
    assert main(["handoff", *shape, "--rounds", "2", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "handoff.json").read_text())
    assert found["bytes"] == 3 * 5 * 4096
    # A first hand-off, and in each round one as a whole, two layer by layer, one at the end.
    moved = 9 * found["bytes"]
    for transport, other in (("cma", "tcp"), ("tcp", "cma")):
        counts = found["results"][transport]["counts"]
        assert (counts[f"{transport}_bytes"], counts[f"{other}_bytes"], counts["failed"]) == (moved, 0, 0)
        assert all(len(seconds) == 2 for seconds in found["results"][transport]["seconds"].values())
    names = [each["what"].partition(": ")[2] for each in found["figures"]]
    for send_type in ("PUT_ASYNC", "PUT", "GET"):
        assert names.count(f"from the last layer to landed, {send_type}") == 2
    assert len(found["figures"]) == 20 and (tmp_path / "handoff.png").exists()


@pytest.mark.fake_gpus
@pytest.mark.parametrize("memory", ["cuda:1", "cuda:0,cuda:1"])
def test_prompts_go_from_a_gpus_memory_to_a_gpus(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLANE_GPU_DRIVER", "fake")
    shape = ["--layers", "3", "--blocks", "5", "--block-layer-bytes", "4k", "--rounds", "2"]
    assert main(["handoff", *shape, "--memory", memory, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "handoff.json").read_text())
    moved = 9 * found["bytes"]
    for transport, other in (("cuda", "tcp"), ("tcp", "cuda")):
        counts = found["results"][transport]["counts"]
        assert (counts[f"{transport}_bytes"], counts[f"{other}_bytes"], counts["failed"]) == (moved, 0, 0)
    assert f"cuda: {moved} by cuda; tcp: {moved} by tcp." in found["note"]


def test_a_transport_that_does_not_reach_the_memory_is_refused() -> None:
    with pytest.raises(SystemExit, match="cma does not reach --memory cuda:0: cuda,tcp do"):
        main(["handoff", "--memory", "cuda:0", "--transports", "tcp,cma"])
    with pytest.raises(SystemExit, match="cuda does not reach --memory host: cma,tcp do"):
        main(["handoff", "--transports", "cuda"])


@pytest.mark.parametrize("memory", ["host", pytest.param("cuda:0,cuda:1", marks=pytest.mark.fake_gpus)])
def test_a_byte_that_did_not_land_is_found(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLANE_GPU_DRIVER", "fake")
    parser = argparse.ArgumentParser()
    handoff.add_arguments(parser)
    shape = [
        "--layers",
        "3",
        "--blocks",
        "5",
        "--block-layer-bytes",
        "4k",
        "--contiguous",
        "--memory",
        memory,
    ]
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
    assert "some of cma,tcp,cuda, not pigeons" in capsys.readouterr().err
