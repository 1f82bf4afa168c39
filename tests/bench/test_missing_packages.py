"""Commands name the packages that their Python lacks, with a command that gets them: the wheel has no dependencies."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import kvlane


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment without pip, which has kvlane and no other package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python3"
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    (Path(packages) / "kvlane").symlink_to(Path(kvlane.__file__).parent)
    shutil.copy2(Path(sysconfig.get_path("scripts")) / "kvlane", folder / "bin/kvlane")
    return python


def give(python: Path, *names: str) -> None:
    """Packages of these names, which are found and hold nothing."""
    for packages in python.parent.parent.glob("lib/python*/site-packages"):
        for name in names:
            (packages / f"{name}.py").touch()


def refusal(*command: str | Path, stdin: str = "") -> str:
    """The sentences of a command that must fail."""
    done = subprocess.run(
        [str(part) for part in command], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


def test_the_demo_names_what_it_lacks(bare: Path) -> None:
    said = refusal(bare, "-m", "kvlane.demo")
    assert f"needs vllm, torch, safetensors, matplotlib, tqdm beside {bare}" in said
    assert "environment that has vLLM 0.24 to 0.33" in said
    assert refusal(bare.with_name("kvlane"), "demo") == said


def test_the_demos_model_names_what_it_lacks(bare: Path, tmp_path: Path) -> None:
    """The demo's model ended with a traceback."""
    said = refusal(bare, "-m", "kvlane.demo.model", "--shape", "tiny", tmp_path / "model")
    assert f"needs torch and safetensors, which come with vLLM, beside {bare}" in said
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "kvlane.bench", "copy"),
        ("-m", "kvlane.bench.replay_picture", "a.png"),
        ("-c", "from kvlane.testing.fake_engine import zeromq; zeromq.load()"),
    ],
)
def test_an_environment_without_pip_is_not_told_to_use_it(bare: Path, command: tuple[str, ...]) -> None:
    said = refusal(bare, *command, stdin="{}")
    assert f"uv pip install --python {bare} " in said
    assert "-m pip" not in said


def test_beside_vllm_the_demo_says_how_to_get_the_rest(tmp_path: Path) -> None:
    """The hint was `make demo`, which a user with a wheel does not have."""
    venv.create(tmp_path / "beside", with_pip=False)
    python = tmp_path / "beside/bin/python"
    give(python, "vllm", "torch", "safetensors", "pip")
    (next(tmp_path.glob("beside/lib/python*/site-packages")) / "kvlane").symlink_to(
        Path(kvlane.__file__).parent
    )
    said = refusal(python, "-m", "kvlane.demo")
    assert f"needs matplotlib, tqdm beside {python}: {python} -m pip install matplotlib tqdm" in said
    assert "make demo" not in said


def test_a_picture_names_what_it_lacks(bare: Path, tmp_path: Path) -> None:
    """kvlane's wheel told people to install kvlane[bench], from an index where the name is not ours."""
    trace = tmp_path / "turns.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n' * 3)
    command = [bare.with_name("kvlane"), "replay", trace, "--policy", "lru", "--capacity", "2"]
    said = refusal(*command, "--plot", tmp_path / "turns.png")
    assert f"a picture needs matplotlib: uv pip install --python {bare} matplotlib" in said
    assert "kvlane[" not in said


def test_this_python_lacks_nothing() -> None:
    """The control: what is there is not named."""
    code = "from kvlane.bench import extra; print(extra.missing(extra.NAMES))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
