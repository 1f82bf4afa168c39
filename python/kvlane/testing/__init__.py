"""Stand-ins for tests: `FakeCore` for the daemon and `kvlane._core`, `fake_engine` for a vLLM server."""

from kvlane.testing.fake_core import FakeCore
from kvlane.testing.fake_ends import FakeScheduler, FakeWorker
from kvlane.testing.fake_records import FakeFinished, FakeHit, read_block, write_block

__all__ = ["FakeCore", "FakeFinished", "FakeHit", "FakeScheduler", "FakeWorker", "read_block", "write_block"]
