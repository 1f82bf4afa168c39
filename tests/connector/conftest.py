"""Makes the helpers beside the tests and those of tests/daemon importable, and leaves out the engine tests where there
is no vLLM. What several engine tests need: a model, a daemon, engines on it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "daemon"))
sys.path.insert(0, str(Path(__file__).parent))
# Read when torch is loaded, which modules of tests do long before an engine is made. Its threads spin while they wait
# for one another: on two busy cores an answer took 7 s in place of 0.2.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from engine import Make, engines
from stores import DaemonStore, FakeStore

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob.append("test_vllm_*.py")


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What kvlane remembers of weights goes to a temporary folder, also in engines that are processes of their own. The
    caches of others stay where they are: they are large, and cold ones cost minutes."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    others = {
        "HF_HOME": "huggingface",
        "VLLM_CACHE_ROOT": "vllm",
        "UV_CACHE_DIR": "uv",
        "PIP_CACHE_DIR": "pip",
    }
    with pytest.MonkeyPatch.context() as patch:
        for variable, name in others.items():
            patch.setenv(variable, os.environ.get(variable) or str(users / name))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Needs torch.
    from tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DaemonStore]:
    made = DaemonStore(tmp_path)
    yield made
    made.close()


@pytest.fixture
def make(store: DaemonStore) -> Iterator[Make]:
    """Starts engines on the daemon and ends them."""
    with engines(store.address) as start:
        yield start


@pytest.fixture
def fake() -> Iterator[FakeStore]:
    made = FakeStore()
    yield made
    made.close()


@pytest.fixture
def make_on_fake(fake: FakeStore) -> Iterator[Make]:
    """Starts engines on the fake and ends them."""
    with engines(fake.address) as start:
        yield start


@pytest.fixture(scope="module")
def nobody(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where no daemon listens: direct hand-offs need none."""
    return f"unix:{tmp_path_factory.mktemp('nobody')}/kvlane.sock"


@pytest.fixture(scope="module")
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines that hand over directly find each other in a folder of the tests' own."""
    folder = tmp_path_factory.mktemp("runtime")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield
