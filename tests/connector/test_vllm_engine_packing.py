"""An engine on a processor with AMX and one without, on one daemon: neither loads what the other one has saved.

vLLM's attention for CPUs packs keys and values by the processor, under one backend name and one shape. So the blocks of
both engines had one namespace and one digest. An engine that moved to another host, or got an SSD file from there,
loaded wrong numbers and answered wrongly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine import Make, prompt
from stores import DaemonStore
from tiny_model import build_tiny_model
from vllm.v1.attention.backends import cpu_attn

from kvlane.connector import layout


@contextmanager
def elsewhere() -> Iterator[None]:
    """Engines that start here write blocks as on a processor with AMX. This one has no instructions to read these, so
    attention goes on to read as if they were its own."""
    schedule = cpu_attn.ops.cpu_attn_get_scheduler_metadata
    choose = cpu_attn._get_attn_isa
    here = choose(torch.float32, 32, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attn, "_get_attn_isa", functools.wraps(choose)(lambda *_, **__: "amx"))
        patch.setattr(
            cpu_attn.ops,
            "cpu_attn_get_scheduler_metadata",
            lambda **named: schedule(**(named | {"isa": here})),
        )
        yield


@pytest.fixture
def shallow_model(tmp_path: Path) -> Path:
    """A model of one layer. Its keys and values do not depend on what attention reads, so they equal those of the
    other host."""
    return build_tiny_model(tmp_path / "shallow", layers=1)


def save_elsewhere(make: Make, store: DaemonStore, model: Path) -> None:
    """An engine on a processor with AMX saves the prompt."""
    with elsewhere():
        engine = make(model)
        engine.generate(prompt(1), tokens=1)
        engine.drain()
        store.settle()


def test_blocks_of_another_packing_are_computed_again(
    make: Make, store: DaemonStore, shallow_model: Path
) -> None:
    save_elsewhere(make, store, shallow_model)
    engine = make(shallow_model)
    own, cached = engine.generate(prompt(1))
    assert cached == 0, "the engine found blocks that it cannot read"
    engine.forget()
    store.settle()
    assert engine.generate(prompt(1)) == (own, 288), "its own blocks lie beside the others"
    assert engine.errors() == 0


def test_engines_whose_packing_is_not_told_share_blocks_and_answer_wrongly(
    make: Make, store: DaemonStore, shallow_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    own, _ = make(shallow_model, extra={"kvlane.namespace": "alone"}).generate(prompt(1))
    monkeypatch.setattr(layout, "backend_name", lambda *_: "CPU_ATTN")
    save_elsewhere(make, store, shallow_model)
    wrong, cached = make(shallow_model).generate(prompt(1))
    assert cached == 288
    assert wrong != own
