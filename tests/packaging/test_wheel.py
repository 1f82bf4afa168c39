"""The wheel of `make wheel`, where there is neither Rust nor a compiler nor any other package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Daemon, Engine

WHEELS = sorted((Path(__file__).parents[2] / "dist").glob("kvlane-*.whl"))
BLOCKS = 20


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an environment has its programs that has the wheel, and nothing else."""
    assert len(WHEELS) == 1, "`make wheel` makes the wheel; `make packaging` does both"
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    install = [folder / "bin/python", "-m", "pip", "install", "--no-index", "--no-cache-dir", WHEELS[0]]
    done = subprocess.run(install, env=only(folder / "bin"), capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def only(programs: Path) -> dict[str, str]:
    """This machine's environment, with no other programs on PATH: no cargo, no rustc, no compiler."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVLANE_", "PYTHON"))}
    return {**kept, "PATH": str(programs)}


def run(programs: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [programs / command[0], *command[1:]],
        env=only(programs),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvlane-") as path:
        yield Path(path)


def test_its_name_says_where_it_runs() -> None:
    (wheel,) = WHEELS
    assert re.fullmatch(r"kvlane-[\d.]+-cp310-abi3-manylinux_2_28_x86_64\.whl", wheel.name)
    assert wheel.stat().st_size < 15_000_000


def test_all_of_the_package_is_in_it() -> None:
    """Tests elsewhere run on a wheel that is packed another way."""
    listed = ["git", "ls-files", "python/kvlane"]
    root = Path(__file__).parents[2]
    sources = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    extensions = {"kvlane/_core.abi3.so", "kvlane/_bench.abi3.so"}
    wanted = {name.removeprefix("python/") for name in sources} | extensions
    with zipfile.ZipFile(WHEELS[0]) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
    assert {name for name in names if name.startswith("kvlane/")} == wanted
    assert any(name.endswith(".data/scripts/kvlane") for name in names)
    # What runs NIXL, Mooncake, iperf3 and fio stays in bench/: a wheel has the package, what describes it, a program.
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
        run(programs, "python", "-c", "import kvlane, kvlane._bench, kvlane._core, kvlane.fabric").returncode
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


def test_the_gpus_that_tests_pretend_to_have_are_not_in_it(programs: Path) -> None:
    """They were: a variable left over from a test had a user's daemon serve GPUs made of shared memory."""
    command, environment = [programs / "kvlane", "doctor"], only(programs) | {"KVLANE_GPU_DRIVER": "fake"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert 'KVLANE_GPU_DRIVER is "fake", but must be cuda or off' in told.stdout
    with zipfile.ZipFile(WHEELS[0]) as wheel:
        having = [name for name in wheel.namelist() if b"of a fake device" in wheel.read(name)]
    assert having == []


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
