"""A wheel where there is neither Rust nor a compiler nor any other package: the tests' own, and in `make manylinux` the
one that users get."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import only, run
from processes import Daemon, Engine

BLOCKS = 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvlane-") as path:
        yield Path(path)


def test_all_of_the_package_is_in_it(wheel: Path) -> None:
    listed = ["git", "ls-files", "python/kvlane"]
    root = Path(__file__).parents[2]
    sources = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    extensions = {"kvlane/_core.abi3.so", "kvlane/_bench.abi3.so"}
    wanted = {name.removeprefix("python/") for name in sources} | extensions
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if not name.endswith("/")]
    assert {name for name in names if name.startswith("kvlane/")} == wanted
    assert any(name.endswith(".data/scripts/kvlane") for name in names)
    for page in ("kvlane", "kvlane-serve", "kvlane-route-drain"):
        assert any(name.endswith(f".data/data/share/man/man1/{page}.1") for name in names), page
    # The code that runs NIXL, Mooncake, iperf3 and fio stays in bench/. The wheel has the package, its description and
    # a program.
    rest = [name for name in names if not name.startswith("kvlane/")]
    assert [name for name in rest if not re.match(r"kvlane-[\d.]+\.(dist-info|data|libs)/", name)] == []


def test_a_daemon_an_engine_that_saves_and_another_one_that_loads(programs: Path, folder: Path) -> None:
    daemon = Daemon(folder, binary=programs / "kvlane", environment={"PATH": str(programs)})
    engines = []
    try:
        daemon.start()
        for name in ("saves", "loads"):
            engine = Engine(daemon.address, name, python=programs / "python", environment=only(programs))
            engines.append(engine)
            engines[-1].wait_connected()
        assert engines[0].call("save", prompt="p", count=BLOCKS)["blocks"] == BLOCKS
        daemon.settle()
        found = engines[1].call("check", prompt="p", count=BLOCKS)
        assert found == {"blocks": BLOCKS, "wrong": [], "ok": True, "detail": ""}
        told = run(programs, "kvlane", "status", "--json", "--addr", daemon.address)
        assert told.returncode == 0, told.stderr
        assert json.loads(told.stdout)["blocks"] == BLOCKS
        # The control: without the daemon there is nothing to load, and nobody to ask.
        assert daemon.stop() == 0
        assert engines[1].call("check", prompt="p", count=BLOCKS)["blocks"] == 0
        assert run(programs, "kvlane", "status", "--addr", daemon.address).returncode != 0
    finally:
        for engine in engines:
            engine.kill()
        daemon.kill()


def subcommands(text: str) -> list[str]:
    """The names in the list of a --help, of clap or of argparse."""
    names = re.findall(r"^ {2,4}([a-z][a-z-]*)(?: {2,}\S|$)", text, re.MULTILINE)
    assert names, text
    return [name for name in names if name != "help"]


def test_every_help_works_without_extras(programs: Path) -> None:
    for extra in ("numpy", "aiohttp", "tqdm", "matplotlib", "torch", "vllm"):
        assert run(programs, "python", "-c", f"import {extra}").returncode != 0, f"{extra} is there"
    assert (
        run(
            programs, "python", "-c", "import kvlane, kvlane._bench, kvlane._core, kvlane.fabric, kvlane.moe"
        ).returncode
        == 0
    )
    first = run(programs, "kvlane", "--help")
    assert {"serve", "status", "bench", "demo"} <= set(subcommands(first.stdout))
    for name in subcommands(first.stdout):
        told = run(programs, "kvlane", name, "--help")
        assert told.returncode == 0 and "sage:" in told.stdout, f"{name}: {told.stderr}"
    benchmarks = subcommands(run(programs, "kvlane", "bench", "--help").stdout)
    assert {"serve", "lookup", "fabric", "ssd", "all"} <= set(benchmarks)
    for name in benchmarks:
        told = run(programs, "kvlane", "bench", name, "--help")
        assert told.returncode == 0 and "usage:" in told.stdout, f"{name}: {told.stderr}"


def test_what_a_benchmark_lacks_is_named_with_how_to_get_it(programs: Path) -> None:
    """The name kvlane is not ours in any index yet: nobody may be told to install it from one."""
    told = run(programs, "kvlane", "bench", "copy", "--rounds", "1")
    assert told.returncode == 2
    assert "pip install aiohttp matplotlib numpy tqdm" in told.stderr
    assert "Traceback" not in told.stderr and "kvlane[" not in told.stderr


def test_vllm_finds_the_plugin(programs: Path) -> None:
    asked = "from importlib.metadata import entry_points; print(*entry_points(group='vllm.general_plugins'))"
    assert "kvlane.plugin:register" in run(programs, "python", "-c", asked).stdout


def test_this_python_is_not_the_one_under_test(programs: Path) -> None:
    """The control of all tests above."""
    assert Path(sys.executable).parent.resolve() != programs.resolve()
    where = run(programs, "python", "-c", "import kvlane; print(kvlane.__file__)").stdout
    assert str(programs.parent) in where
