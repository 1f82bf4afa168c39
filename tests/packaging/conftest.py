"""Makes the helpers beside the daemon's tests importable, and installs a wheel where nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "daemon"))
sys.path.insert(0, str(Path(__file__).parent))

from installed import only

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel under test, from the folder that KVLANE_TEST_WHEEL names."""
    wheels = list((ROOT / os.environ["KVLANE_TEST_WHEEL"]).glob("kvlane-*.whl"))
    assert len(wheels) == 1, "`make packaging` and `make manylinux` make the wheel"
    return wheels[0]


@pytest.fixture(scope="session")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    install = [folder / "bin/python", "-m", "pip", "install", "--no-index", "--no-cache-dir", wheel]
    done = subprocess.run(install, env=only(folder / "bin"), capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    return folder / "bin"
