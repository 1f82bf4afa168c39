"""The kinds of job, in the order in which both roles ask them.

- reset: finds which weights the engine has; prompts wait while they are unknown.
- copy: has blocks copied inside the engine's own cache.
- land: lands prompts that a prefill engine hands over directly in this engine's own cache.
- load: looks prompts up, and loads the daemon's blocks.
- last_block: has the last block of a prompt copied where the engine's own cache has it.
- save: saves full blocks.
- direct: lends blocks to decode engines.

A further kind is a class for each role in which it works, and a line in each list here.
"""

from __future__ import annotations

from kvlane.connector.kinds.copies import CopyBlocks
from kvlane.connector.kinds.copies_worker import CopyBlocksWorker
from kvlane.connector.kinds.direct_land import LandDirect
from kvlane.connector.kinds.direct_offer import OfferDirect
from kvlane.connector.kinds.direct_worker import DirectWorker
from kvlane.connector.kinds.kind import SchedulerKind, SchedulerShared, WorkerKind, WorkerShared
from kvlane.connector.kinds.last_block import LastBlock
from kvlane.connector.kinds.load import LookUpAndLoad
from kvlane.connector.kinds.load_worker import LoadWorker
from kvlane.connector.kinds.reset import Reset
from kvlane.connector.kinds.reset_worker import DigestWeights
from kvlane.connector.kinds.save import SaveBlocks
from kvlane.connector.kinds.save_worker import SaveWorker


def scheduler_kinds(shared: SchedulerShared) -> list[SchedulerKind]:
    """The kinds of the scheduler role. The first that has an answer for a prompt decides."""
    loads, saves, copies = LookUpAndLoad(shared), SaveBlocks(shared), CopyBlocks(shared)
    return [
        Reset(shared),
        copies,
        LandDirect(shared, loads, saves.saves, copies),
        loads,
        LastBlock(shared, copies),
        OfferDirect(shared),
        saves,
    ]


def worker_kinds(shared: WorkerShared) -> list[WorkerKind]:
    """The kinds of the worker role."""
    return [
        CopyBlocksWorker(shared),
        LoadWorker(shared),
        SaveWorker(shared),
        DirectWorker(shared),
        DigestWeights(shared),
    ]
