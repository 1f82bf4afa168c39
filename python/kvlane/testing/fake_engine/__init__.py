"""A fake of vLLM's server: `python -m kvlane.testing.fake_engine --help`, or `FakeEngine` in a test."""

from kvlane.testing.fake_engine.process import FakeEngine

__all__ = ["FakeEngine"]
