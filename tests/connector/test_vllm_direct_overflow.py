"""A burst of prompts to a real decode engine with room for few of them: the others wait in its daemon's pool.

P computes each prompt before D gets its request, as behind proxies for P2P NCCL. P uses no daemon. Answers are compared
with those of P alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from direct_pair import DIRECT, land_kind, wait_until
from engine import BLOCK, InProcessEngine, prompt, wait_until_ready
from prefill_engine import PrefillEngine
from stores import DaemonStore

pytestmark = pytest.mark.old_vllm_soak
# D has room for three of these, of which each grows to 18 blocks.
BLOCKS = 62
TOKENS = 470
WHOLE = TOKENS // BLOCK * BLOCK
# So many that the first prompts run until the others have come.
GENERATED = 100
BURST = 6


@pytest.fixture(scope="module")
def p(model: Path, nobody: str, runtime_folder: None) -> Iterator[PrefillEngine]:
    engine = PrefillEngine(model, nobody, DIRECT)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonStore]:
    made = DaemonStore(tmp_path_factory.mktemp("daemon"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def d(model: Path, store: DaemonStore, runtime_folder: None) -> Iterator[InProcessEngine]:
    engine = InProcessEngine(model, store.address, blocks=BLOCKS, extra=DIRECT)
    wait_until_ready(engine)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def books_stay_even(d: InProcessEngine, store: DaemonStore) -> Iterator[None]:
    d.forget()
    store.drop_all()
    before = d.books()
    d.counted.clear()
    # The test before may have killed the daemon, after which nothing overflows for some seconds.
    land_kind(d)._overflow._paused_until = 0.0
    yield
    d.generate(prompt(99, 40), 1)
    d.forget()
    assert d.books() == before
    assert d.errors() == 0


class Burst:
    """Prompts that P has computed, and that D gets all at once."""

    def __init__(self, p: PrefillEngine, d: InProcessEngine, first: int) -> None:
        self.prompts = [prompt(first + number, TOKENS) for number in range(BURST)]
        self.right = [p.ask("generate", each, GENERATED) for each in self.prompts]
        self.names: list[str] = []
        self._d = d
        self._outputs: dict[str, Any] = {}
        for each in self.prompts:
            p.ask("prefill", each, {"do_remote_decode": True})
            self.names.append(d.add(each, GENERATED, p.ask("finish")))

    def step(self) -> None:
        """A step of D."""
        outputs = self._d.llm.llm_engine.step()
        self._outputs.update({each.request_id: each for each in outputs if each.finished})

    def step_until(self, what: str, is_so: Callable[[], bool]) -> None:
        wait_until(what, is_so, self.step)

    def answers(self) -> tuple[list[list[int]], list[int]]:
        """The answers, and how many tokens of each prompt D computed."""
        self._outputs.update(self._d.run())
        found = [self._outputs[name] for name in self.names]
        tokens = [list(each.outputs[0].token_ids) for each in found]
        return tokens, [TOKENS - each.num_cached_tokens for each in found]


def overflowing(d: InProcessEngine) -> list[Any]:
    """The prompts that overflow and are not stored yet."""
    landings = land_kind(d)._landings.values()
    return [each for each in landings if each.overflow is not None and not each.is_ready]


@pytest.mark.old_vllm
def test_what_finds_no_room_waits_in_the_daemons_pool_and_is_computed_nowhere_twice(
    p: PrefillEngine, d: InProcessEngine, store: DaemonStore
) -> None:
    burst = Burst(p, d, 100)
    got, computed = burst.answers()
    assert got == burst.right
    assert len({tuple(each) for each in got}) == BURST, (
        "answers that hardly depend on their prompts prove nothing"
    )
    assert d.counted["direct_overflows"] >= 2
    assert d.counted["direct_overflows"] + d.counted["direct_landed"] == BURST
    assert d.counted["direct_fallbacks"] == 0
    # One that landed computes a token. One that overflowed also computes what its last block has.
    assert all(each in (1, TOKENS - WHOLE) for each in computed), computed
    assert store.lease_count() == 0


def test_a_byte_that_is_flipped_in_the_pool_changes_the_answer(
    p: PrefillEngine, d: InProcessEngine, store: DaemonStore
) -> None:
    """The control."""
    burst = Burst(p, d, 110)
    burst.step_until("a prompt is stored", lambda: d.counted["direct_overflowed_tokens"] > 0)
    store.corrupt()
    got, _ = burst.answers()
    assert got != burst.right


@pytest.mark.soak
@pytest.mark.parametrize("at", ["in its READs", "in its saves"])
def test_when_the_daemon_is_killed_amid_it_the_prompts_are_computed(
    p: PrefillEngine, d: InProcessEngine, store: DaemonStore, at: str
) -> None:
    burst = Burst(p, d, 120 if at == "in its READs" else 130)
    if at == "in its saves":
        burst.step_until("a prompt overflows", lambda: bool(overflowing(d)))
        store.stop()
        burst.step_until("it saves", lambda: any(each.overflow.in_saves for each in overflowing(d)))
        store.resume()
    else:
        burst.step_until("it reads", lambda: any(each.taken for each in overflowing(d)))
    store.restart()
    got, _ = burst.answers()
    assert got == burst.right
    burst.step_until("the daemon is back", lambda: bool(d.connector._scheduler._shared.core.ready))


@pytest.mark.soak
def test_when_p_is_killed_amid_it_what_was_saved_is_used(
    model: Path, nobody: str, d: InProcessEngine, store: DaemonStore
) -> None:
    p = PrefillEngine(model, nobody, DIRECT)
    burst = Burst(p, d, 140)
    burst.step_until("a prompt overflows", lambda: any(each.overflow.next_save for each in overflowing(d)))
    p.kill()
    got, computed = burst.answers()
    assert got == burst.right
    assert any(each > TOKENS - WHOLE for each in computed)
    assert store.lease_count() == 0


@pytest.mark.soak
def test_an_abort_amid_it_leaves_nothing_behind(
    p: PrefillEngine, d: InProcessEngine, store: DaemonStore
) -> None:
    burst = Burst(p, d, 150)
    burst.step_until("a prompt overflows", lambda: any(each.overflow.next_save for each in overflowing(d)))
    d.llm.llm_engine.abort_request(burst.names)
    wait_until("nothing is left", lambda: not land_kind(d)._landings, lambda: d.generate(prompt(98, 40), 1))
    assert store.lease_count() == 0
