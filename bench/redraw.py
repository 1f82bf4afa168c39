"""Draws the committed pictures again, from the committed results that they show.

    python bench/redraw.py            after a result was added here, or the drawing changed; needs matplotlib
    python bench/redraw.py --check    fails when a picture does not show its result

A picture holds, beside its pixels, all names and values that were drawn (`kvlane.bench.drawing.facts_in`): the check
compares them with what the result says now.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
# Without an installed kvlane too, and beside one of another version.
sys.path[:0] = [
    str(ROOT / name)
    for name in ("python", "bench", "bench/gpu", "bench/builds", "bench/pd", "bench/replay", "bench/route")
]

import direct as pd_direct  # noqa: E402
import first_picture  # noqa: E402
import pictures as gpu_pictures  # noqa: E402
import pool  # noqa: E402
import roles  # noqa: E402
import route_peers  # noqa: E402
import shared_pool  # noqa: E402
import two_builds  # noqa: E402

from kvlane.bench import drawing, learned_picture, pictures, replay_picture, route_replay_picture  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The committed pictures of each result.
FABRIC = {
    "2026-11-23-two-cores": ("", "-latency", "-one-host", "-one-host-latency", "-goals"),
    "2026-11-23-two-cores-2": ("-goals",),
    "2026-11-23-16-cores": ("-one-host",),
    "2026-11-23-h200-gpu-memory": ("",),
}


@dataclass(frozen=True)
class Redrawn:
    """A committed picture."""

    path: Path
    result: Path
    facts: dict[str, Any]
    draw: Callable[[], Figure]


def committed() -> Iterator[Redrawn]:
    """All of them."""
    ssd, fabric, gpu, replay, builds = (
        ROOT / "bench" / name / "results" for name in ("ssd", "fabric", "gpu", "replay", "builds")
    )
    one = gpu / "2026-11-30-h200-one-after-the-other-kvlane-last.json"
    yield _bars(ROOT / "docs/pictures/ten-thousand-cached-tokens.png", one, first_picture.picture(_read(one)))
    for name, mode in (
        ("2026-11-22-h200-eager", "eager"),
        ("2026-11-22-h200-graphs", "graphs"),
        ("2026-11-30-h200-one-after-the-other-busy", "graphs"),
        ("2026-11-30-h200-one-after-the-other-kvlane-last", "graphs"),
        ("2026-12-01-h200-one-after-the-other-eager", "eager"),
    ):
        result = gpu / f"{name}.json"
        yield _bars(gpu / f"{name}.png", result, gpu_pictures.compared(_read(result), mode))
    for name in (
        "2026-11-29-h200-busy",
        "2026-11-29-h200-busy-again",
        "2026-11-30-h200-busy",
        "2026-12-01-h200-busy",
    ):
        result = gpu / f"{name}.json"
        yield _bars(result.with_suffix(".png"), result, gpu_pictures.beside_decodes(_read(result)))
    for name in (
        "2026-11-23-h200-vllm-0.33-restart",
        "2026-11-29-h200-restart",
        "2026-11-30-h200-windows-restart",
        "2026-11-30-h200-states-restart",
        "2026-11-30-h200-mla-restart",
        "2026-12-01-h200-restart",
    ):
        result = gpu / f"{name}.json"
        yield _bars(result.with_suffix(".png"), result, gpu_pictures.restarted(_read(result)))
    result = gpu / "2026-11-30-cpu-all-to-all.json"
    if (picture := pictures.goals(_read(result))) is not None:
        yield _bars(result.with_suffix(".png"), result, picture)
    for name in (
        "2026-11-29-two-h200-all-to-all/experts-4096",
        "2026-11-30-two-h200-all-to-all/experts-128-deepep",
        "2026-11-30-two-h200-all-to-all-parts/experts-128",
        "2026-11-30-h200-all-to-all/four-ranks-4096",
    ):
        result = gpu / f"{name}.json"
        yield _bars(result.with_suffix(".png"), result, pictures.of_the_slowest_rank(_read(result)))
    for name in ("2026-11-30-two-h200-shared-pool", "2026-11-30-two-h200-mla-shared-pool"):
        result = gpu / f"{name}.json"
        yield _bars(result.with_suffix(".png"), result, shared_pool.picture(_read(result)))
    for result in sorted(ssd.glob("*.json")):
        if (picture := pictures.goals(_read(result))) is not None:
            yield _bars(result.with_suffix(".png"), result, picture)
    remote = ROOT / "bench/remote/results"
    for result in sorted(remote.glob("*demo-cluster.json")):
        yield _bars(result.with_suffix(".png"), result, pictures.hosts(_read(result)))
    for result in sorted(remote.glob("*two-cores*.json")):
        if (picture := pictures.goals(_read(result))) is not None:
            yield _bars(result.with_suffix(".png"), result, picture)
    live_page, record = (ROOT / "bench" / name / "results" for name in ("live_page", "record"))
    for result in (*sorted(live_page.glob("*.json")), *sorted(record.glob("*-route.json"))):
        if (picture := pictures.goals(_read(result))) is not None:
            yield _bars(result.with_suffix(".png"), result, picture)
    for result in sorted(builds.glob("*.json")):
        yield _bars(result.with_suffix(".png"), result, two_builds.picture(_read(result)))
    for result in sorted((ROOT / "bench/route/results").glob("*.json")):
        if (read := _read(result)).get("compared"):
            yield _bars(result.with_suffix(".png"), result, route_peers.picture(read))
        elif "rows" in read and "engines" in read:
            yield _bars(result.with_suffix(".png"), result, pool.picture(read))
    for result in sorted((ROOT / "bench/pd/results").glob("*.json")):
        if (read := _read(result)).get("benchmark"):
            # Those with a name have a table in the README, which says it all.
            continue
        picture = pd_direct.picture(read) if "systems" in read else pictures.pairs(read)
        yield _bars(result.with_suffix(".png"), result, picture)
    for name, wanted in FABRIC.items():
        result = fabric / f"{name}.json"
        drawn = pictures.fabric(_read(result))
        for suffix in wanted:
            yield _bars(fabric / f"{name}{suffix}.png", result, drawn[suffix])
    for result in sorted(replay.glob("*.json")):
        read = _read(result)
        if "sent_late_at_most_s" in read:
            # A table in the README says it all.
            continue
        kinds = (("roles", roles), ("fleet", route_replay_picture), ("", replay_picture))
        of = next(module for key, module in kinds if not key or key in read)
        yield Redrawn(
            result.with_suffix(".png"), result, of.facts(read), lambda of=of, read=read: of.picture(read)
        )
        if any(each.get("learnt") for each in read.get("results", [])):
            yield Redrawn(
                result.with_name(f"{result.stem}-learned.png"),
                result,
                learned_picture.facts(read),
                lambda read=read: learned_picture.picture(read),
            )


def _read(result: Path) -> Any:
    return json.loads(result.read_text())


def _bars(path: Path, result: Path, picture: drawing.Picture) -> Redrawn:
    return Redrawn(path, result, picture.facts(), lambda: drawing.draw(picture))


def stale(pictures: Iterator[Redrawn]) -> Iterator[str]:
    """A sentence for each picture that does not show its result."""
    for each in pictures:
        if not each.path.exists():
            yield f"{each.path.relative_to(ROOT)} is missing"
        elif drawing.facts_in(each.path) != each.facts:
            yield f"{each.path.relative_to(ROOT)} does not show {each.result.name}"


def main() -> int:
    if "--check" not in sys.argv[1:]:
        for each in committed():
            drawing.write(each.draw(), each.facts, each.path)
            print(each.path.relative_to(ROOT))
        return 0
    wrong = list(stale(committed()))
    for sentence in wrong:
        print(f"{sentence}: run python bench/redraw.py", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
