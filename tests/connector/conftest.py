"""Makes the helpers beside the tests importable, and leaves out the engine tests where there is no vLLM. What several
engine tests need: a model, a daemon, engines on it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine import Make, engines
from stores import DaemonStore

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob.append("test_vllm_*.py")


@pytest.fixture(scope="module")
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
