"""The metric by which a router knows that several engines load from one daemon."""

from __future__ import annotations

from typing import Any, cast

from fakes import Engine, Request, full_group

from kvlane.connector.shared_pool import START_SECONDS, PoolInfo
from kvlane.testing import FakeCore


class Gauge:
    """Prometheus' gauge: a value for each set of labels."""

    def __init__(self) -> None:
        self.values: dict[tuple[object, ...], float] = {}

    def labels(self, *values: object) -> Any:
        class Child:
            @staticmethod
            def set(value: float) -> None:
                self.values[values] = value

        return Child

    def remove(self, *values: object) -> None:
        assert self.values.pop(values) == 0

    def named(self) -> list[tuple[object, ...]]:
        return [labels for labels, value in self.values.items() if value == 1]


class Watched:
    """An engine, and the metric that its parts make."""

    def __init__(self, engine: Engine, number: str) -> None:
        self.engine = engine
        self.gauge = Gauge()
        self.info = PoolInfo(cast("Any", self.gauge), ["model", number])

    def step(self) -> None:
        self.engine.step()
        # vLLM brings the ranks' parts and the scheduler's together, in any order.
        for side in (*self.engine.workers, self.engine.scheduler):
            part = side.pool.take()
            if part is not None:
                self.info.hear(part)

    def pool(self) -> tuple[object, object] | None:
        self.step()
        named = self.gauge.named()
        assert len(self.gauge.values) == len(named) <= 1, (
            "an engine has one pool, and leaves no series behind"
        )
        return (named[0][2], named[0][3]) if named else None


def test_engines_that_share_blocks_name_the_same_pool_before_their_first_request() -> None:
    """A router could not know that the second engine would load what the first one has computed."""
    store = FakeCore()
    first = Watched(Engine(store, engine_id="first", workers=2), "0")
    second = Watched(Engine(store, engine_id="second", workers=2), "1")
    assert second.engine.scheduler.pool.is_due(), "it steps without a request, to tell of it"
    pool = first.pool()
    assert pool is not None and pool == second.pool()
    assert pool[0] == store.boot.hex() and len(str(pool[1])) == 32
    assert not second.engine.scheduler.pool.is_due()

    prompt = Request("r", list(range(20)))
    first.engine.run(prompt)
    assert second.engine.run(Request("r2", list(range(20)))) == 19, "it does load it"
    for apart in (
        Watched(Engine(store, engine_id="third", workers=1), "2"),
        Watched(Engine(store, [full_group(1)], engine_id="fourth", workers=2), "3"),
        Watched(Engine(FakeCore(), engine_id="fifth", workers=2), "4"),
    ):
        assert apart.pool() not in (None, pool)


def test_the_pool_follows_the_daemon() -> None:
    store = FakeCore()
    watched = Watched(Engine(store), "0")
    before = watched.pool()
    assert before is not None
    store.down = True
    assert watched.pool() is None, "what is out of reach cannot be loaded"
    assert not watched.engine.scheduler.pool.is_due(), "nothing is to be told without a daemon"
    store.down = False
    assert watched.pool() == before
    store.restart()
    after = watched.pool()
    assert after is not None and after[0] == store.boot.hex() != before[0] and after[1] == before[1]
    # The weights change, and only engines with the same weights find these blocks.
    watched.engine.weights.present = "other"
    watched.engine.scheduler.reset()
    assert watched.pool() is None, "nothing is looked up until the workers have told what they compute with"
    asking = Request("r", list(range(20)))
    watched.engine.scheduler.add_request(asking)
    assert watched.engine.scheduler.matched_tokens(asking, 0) == (None, False)
    watched.step()
    changed = watched.pool()
    assert changed is not None and changed[0] == after[0] and changed[1] != after[1]


def test_an_engine_that_has_found_no_daemon_steps_for_it_for_a_moment_only() -> None:
    store = FakeCore()
    store.down = True
    engine = Engine(store)
    assert engine.scheduler.pool.is_due()
    engine.now += START_SECONDS / 2
    engine.step()
    assert engine.scheduler.pool.is_due()
    engine.now += START_SECONDS
    assert not engine.scheduler.pool.is_due()
    store.down = False
    assert engine.scheduler.pool.is_due()
