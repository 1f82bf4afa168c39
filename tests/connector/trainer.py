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
