"""What a trainer does with an engine inside the test's process, between two steps of its own."""

from __future__ import annotations

import functools
from typing import Any

import torch
from engine import InProcessEngine

from kvlane.connector import weights


def train(worker: Any, factor: float) -> None:
    """One step of a trainer: the weights change where they lie."""
    with torch.no_grad():
        for parameter in worker.model_runner.get_model().parameters():
            parameter.mul_(factor)


def name_them(worker: Any, version: str) -> None:
    weights.name_weights(version)


def retrain(engine: InProcessEngine, factor: float, version: str | None = None) -> None:
    """New weights, and no block of the old ones."""
    engine.core.pause_scheduler("keep", clear_cache=False)
    engine.llm.collective_rpc(functools.partial(train, factor=factor))
    if version is not None:
        engine.llm.collective_rpc(functools.partial(name_them, version=version))
    assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.core.resume_scheduler()


def retrain_amid_requests(engine: InProcessEngine, factor: float) -> None:
    """New weights; vLLM keeps its blocks, since requests run, and resets the connector all the same."""
    engine.llm.collective_rpc(functools.partial(train, factor=factor))
    assert not engine.llm.reset_prefix_cache(reset_connector=True)


def interrupt(engine: InProcessEngine, how: str, names: list[str]) -> None:
    """Calls vLLM's `sleep`, `pause abort`, `pause keep` or `reset`. The first two abort the requests of these names;
    the others go on with them."""
    if how == "sleep":
        engine.llm.sleep(level=1)
        engine.llm.wake_up()
    elif how == "reset":
        assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    else:
        engine.core.pause_scheduler(how.removeprefix("pause "))
        engine.core.resume_scheduler()
    if how in ("sleep", "pause abort"):
        # vLLM tells its frontend only when that is another process.
        engine.llm.llm_engine.abort_request(names)
