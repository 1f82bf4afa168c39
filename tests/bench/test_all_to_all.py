"""`kvlane bench all-to-all` between real processes, tiny."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlane.bench.__main__ import main


@pytest.mark.parametrize(
    ("routing", "layout"), [("uniform", "experts"), ("zipf", "tokens"), ("one-expert", "masked")]
)
def test_every_round_of_every_part_is_measured(
    routing: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    sizes = ["--ranks", "2", "--tokens", "4", "--experts", "6", "--top-k", "2", "--hidden", "16"]
    sizes += ["--routing", routing, "--layout", layout]
    assert main(["all-to-all", *sizes, "--rounds", "3", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "all-to-all.json").read_text())
    times = found["ms_by_round"]
    # Where torch is, gloo takes part.
    parts = {
        "dispatch",
        "combine-reduced",
        "dispatch-send",
        "dispatch-receive",
        "combine-send",
        "combine-receive",
    }
    assert parts | (set() if layout == "tokens" else {"combine"}) <= times.keys()
    assert all(len(each) == 3 and min(each) > 0 for each in times.values())


def test_flags_that_ranks_on_cpus_would_not_heed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--cast, --num-sms: with --device cuda only"):
        main(["all-to-all", "--cast", "--num-sms", "3", "--layout", "tokens", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="a token names 8 of 4 experts: lower --top-k"):
        main(["all-to-all", "--experts", "4", "--out", str(tmp_path)])


def test_sizes_that_cannot_be_are_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="row_bytes is 30, and has to be a multiple of 16"):
        main(["all-to-all", "--ranks", "2", "--hidden", "15", "--rounds", "1", "--out", str(tmp_path)])
