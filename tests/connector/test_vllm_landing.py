"""What a real vLLM does when blocks that another engine computed become its own prefix cache.

Handing prompts from engine to engine rests on this behaviour, of each vLLM version. The other engine is this one,
which computed the prompt before and has forgotten it. Every answer is compared with that of then, and each test says
what the engine may not do, or has a control in which the same goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCK, InProcessEngine, engines, prompt
from landing_connector import Landing, LandingConnector
from peer_folder import PeerFolder
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput

pytestmark = pytest.mark.old_vllm

ASKS_BEFORE_PREEMPTION = hasattr(KVConnectorBase_V1, "has_pending_block_frees")
TELLS_OF_LOADS_BEFORE_THE_FORWARD_PASS = hasattr(SchedulerOutput, "has_sync_kv_loads")
BLOCKS = 128
ANSWER = 16
MANY_STEPS = 400


class Decoder:
    """An engine in which blocks land, and what its peer has computed."""

    def __init__(self, engine: InProcessEngine, folder: PeerFolder) -> None:
        self.engine, self.peer = engine, folder
        self.connector: LandingConnector = engine.connector
        self.pool: Any = engine.connector.pool
        self.worker: Any = get_kv_transfer_group()
        self.outputs: dict[str, Any] = {}

    def computed(self, tokens: list[int], name: str, answer: int = ANSWER) -> list[int]:
        """What one engine answers; its blocks are the peer's from now on, and this engine knows nothing of them."""
        asked = self.engine.add(tokens, answer, keep=name)
        (said,) = self.run(asked)
        assert self.pool.reset_prefix_cache()
        assert self.peer.blocks(name) == -(-len(tokens) // BLOCK)
        return said

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self.engine.llm.llm_engine.step():
                self.outputs[output.request_id] = output

    def step_until(self, happened: Callable[[], bool]) -> None:
        for _ in range(MANY_STEPS):
            if happened():
                return
            self.step()
        raise AssertionError("it never happened")

    def has_ended(self, name: str) -> bool:
        return name in self.outputs and self.outputs[name].finished

    def run(self, *names: str) -> list[list[int]]:
        self.step_until(lambda: all(map(self.has_ended, names)))
        return [list(self.outputs[name].outputs[0].token_ids) for name in names]

    def abort(self, name: str) -> None:
        self.engine.llm.llm_engine.abort_request([name])
        self.step()

    def request(self, name: str) -> Any:
        """As the scheduler has it; vLLM puts something behind the name."""
        return next(each for key, each in self.engine.scheduler.requests.items() if key.startswith(name))

    def lives(self, name: str) -> bool:
        return any(key.startswith(name) for key in self.engine.scheduler.requests)

    def landing(self, name: str) -> Landing:
        return self.connector.landings[self.request(name).request_id]

    def step_until_written(self, name: str, blocks: int) -> None:
        self.step_until(lambda: self.landing(name).written == blocks)

    def books(self) -> tuple[int, int]:
        """Free blocks, and all references."""
        references = sum(block.ref_cnt for block in self.pool.blocks if not block.is_null)
        return self.pool.get_num_free_blocks(), references


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> PeerFolder:
    return PeerFolder(tmp_path_factory.mktemp("peer"))


@pytest.fixture(scope="module")
def engine(model: Path, folder: PeerFolder) -> Iterator[InProcessEngine]:
    transfer = {
        "kv_connector": "LandingConnector",
        "kv_connector_module_path": "landing_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(folder.path)},
    }
    with engines(None) as start:
        yield start(model, blocks=BLOCKS, transfer=transfer)


@pytest.fixture
def decoder(engine: InProcessEngine, folder: PeerFolder) -> Iterator[Decoder]:
    """An engine that holds nothing; after the test it has to hold nothing again."""
    for file in folder.path.iterdir():
        file.unlink()
    made = Decoder(engine, folder)
    made.connector.behave_well()
    made.connector.computed.clear()
    assert made.pool.reset_prefix_cache()
    before = made.books()
    assert before == (BLOCKS - 1, 0)
    yield made
    made.step(2)
    assert not made.connector.landings
    assert made.books() == before


# Landing.


@pytest.mark.parametrize("tokens", [300, 320, 100, 20])
def test_blocks_of_another_engine_become_a_local_hit_and_one_token_is_computed(
    decoder: Decoder, tokens: int
) -> None:
    """The last block is partial, whole, partial, and the only one."""
    wanted = prompt(tokens, tokens)
    alone = decoder.computed(wanted, "theirs")
    running = decoder.engine.add(prompt(1, 40), 40)
    name = decoder.engine.add(wanted, ANSWER, land="theirs")
    decoder.step(5)
    assert decoder.request(running).num_output_tokens >= 4, "others go on while one waits"
    assert decoder.request(name).num_output_tokens == 0

    decoder.peer.offer("theirs")
    assert decoder.run(name) == [alone]
    assert decoder.outputs[name].num_cached_tokens == tokens - 1
    assert decoder.connector.computed["theirs"] == 1 + ANSWER - 1
    decoder.run(running)


def test_an_answer_that_hardly_depends_on_its_blocks_would_prove_nothing(decoder: Decoder) -> None:
    """A byte that differs in a whole block, and one in the last, each change the answer."""
    wanted = prompt(2, 9 * BLOCK + 31)
    alone = decoder.computed(wanted, "theirs")
    for name, block in (("a whole one", 0), ("the last one", 9)):
        decoder.peer.copy("theirs", name)
        decoder.peer.flip(name, block)
        decoder.peer.offer(name)
        (answer,) = decoder.run(decoder.engine.add(wanted, ANSWER, land=name))
        assert answer != alone
        assert decoder.pool.reset_prefix_cache()


def test_blocks_land_while_the_other_engine_computes_and_what_came_is_used_when_it_goes(
    decoder: Decoder,
) -> None:
    wanted = prompt(3)
    alone = decoder.computed(wanted, "theirs")
    name = decoder.engine.add(wanted, ANSWER, land="theirs")
    for blocks in (3, 6):
        decoder.peer.offer("theirs", blocks, ended=False)
        decoder.step_until_written(name, blocks)
        assert decoder.request(name).num_output_tokens == 0
    decoder.peer.offer("theirs", 6, ended=True)
    assert decoder.run(name) == [alone]
    assert decoder.outputs[name].num_cached_tokens == 6 * BLOCK


def test_blocks_that_the_engine_has_by_itself_are_held_and_not_taken(decoder: Decoder) -> None:
    wanted = prompt(4)
    alone = decoder.computed(wanted, "theirs")
    decoder.run(decoder.engine.add(wanted[: 4 * BLOCK + 1], 1))
    name = decoder.engine.add(wanted, ANSWER, land="theirs")
    decoder.peer.offer("theirs", 8, ended=False)
    decoder.step_until_written(name, 8)
    assert [len(decoder.landing(name).local), len(decoder.landing(name).taken)] == [4, 4]
    # The same prompt is computed here meanwhile: now there are two blocks of each hash.
    assert decoder.run(decoder.engine.add(wanted, ANSWER)) == [alone]
    decoder.peer.offer("theirs")
    assert decoder.run(name) == [alone]
    assert decoder.outputs[name].num_cached_tokens == 299


@pytest.mark.parametrize("left_alone", [True, False])
def test_a_prompt_whose_probabilities_are_wanted_has_to_be_left_alone(
    decoder: Decoder, left_alone: bool
) -> None:
    """All of it has to be computed. Newer versions ignore what a connector answers then; older ones have it wait."""
    from vllm import SamplingParams

    decoder.connector.leaves_probabilities_alone = left_alone
    extra = {"kv_transfer_params": {"land": "theirs"}}
    parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, extra_args=extra)
    name = f"probabilities {left_alone}"
    decoder.engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt(5)}, parameters)
    decoder.step(5)
    assert decoder.has_ended(name) == (left_alone or ASKS_BEFORE_PREEMPTION)
    if decoder.lives(name):
        decoder.abort(name)


# The last block.


@pytest.mark.parametrize("held", [True, False])
def test_the_source_of_the_last_block_is_held_a_step_or_another_copy_overwrites_it(
    decoder: Decoder, held: bool
) -> None:
    """Freed at once it is the first free block, so the next request of the same step gets it: its copy's target."""
    prompts = [prompt(10, 300), prompt(11, 200)]
    alone = [decoder.computed(each, f"prompt{number}") for number, each in enumerate(prompts)]
    decoder.connector.holds_sources = held
    before = decoder.connector.targets_that_are_sources
    names = [decoder.engine.add(each, ANSWER, land=f"prompt{number}") for number, each in enumerate(prompts)]
    for number in range(2):
        decoder.peer.offer(f"prompt{number}")
    # Right also where they meet: here copies run one after the other.
    assert decoder.run(*names) == alone
    assert (decoder.connector.targets_that_are_sources > before) == (not held)


def test_loads_start_before_the_forward_pass_in_each_step_in_which_a_request_waits_for_them(
    decoder: Decoder,
) -> None:
    wanted = prompt(12)
    decoder.computed(wanted, "theirs")
    decoder.worker.hooks.clear()
    decoder.run(decoder.engine.add(prompt(13, 40), 1))
    usual = decoder.worker.hooks.copy()
    name = decoder.engine.add(wanted, 1, land="theirs")
    decoder.peer.offer("theirs")
    decoder.step_until(lambda: decoder.landing(name).ready)
    decoder.worker.hooks.clear()
    decoder.run(name)
    with_copy = decoder.worker.hooks.copy()
    layers = ["layer"] * (len(usual) - 2)
    assert len(layers) == len(decoder.worker.caches)
    assert with_copy == ["start_load_kv", *layers, "wait_for_save"]
    if TELLS_OF_LOADS_BEFORE_THE_FORWARD_PASS:
        assert usual == [*layers, "start_load_kv", "wait_for_save"]
    else:
        assert usual == with_copy


# The trap.


@pytest.mark.parametrize("hook", ["build_connector_meta", "get_num_new_matched_tokens"])
def test_blocks_taken_amid_a_lookup_overwrite_the_hit_of_another_request(decoder: Decoder, hook: str) -> None:
    """vLLM has told the request of its hit already, but holds the blocks only when it allocates the others."""
    here, theirs = prompt(20, 200), prompt(21, 200)
    filler = [prompt(seed, 1000) for seed in (22, 23)]
    alone = decoder.computed(theirs, "theirs")
    answer = decoder.run(decoder.engine.add(here, ANSWER))
    decoder.run(*(decoder.engine.add(each, 1) for each in filler))
    # The first prompt's free blocks are the oldest, apart from those without a hash.
    unused = [block for block in decoder.pool.blocks if block.ref_cnt == 0 and block.block_hash is None]
    decoder.pool.touch(unused)

    decoder.connector.takes_in = hook
    asked = decoder.engine.add(here, ANSWER)
    lands = decoder.engine.add(theirs, ANSWER, land="theirs")
    decoder.peer.offer("theirs")
    got = decoder.run(asked)
    assert decoder.outputs[asked].num_cached_tokens == 192
    if hook == "build_connector_meta":
        assert got == answer
        assert decoder.run(lands) == [alone]
    else:
        assert got != answer
        decoder.run(lands)
    decoder.pool.free_blocks(unused)


# Aborts.


@pytest.mark.parametrize(
    ("moment", "found"), [("before", 0), ("half way", 5), ("when all is there", 9), ("while it runs", 9)]
)
def test_a_request_is_aborted_and_what_came_serves_the_next(
    decoder: Decoder, moment: str, found: int
) -> None:
    wanted = prompt(30)
    alone = decoder.computed(wanted, "theirs")
    free = decoder.books()
    name = decoder.engine.add(wanted, ANSWER, land="theirs")
    decoder.step()
    if moment == "half way":
        decoder.peer.offer("theirs", 5, ended=False)
        decoder.step_until_written(name, 5)
        assert decoder.books() == (BLOCKS - 1 - 5, 5)
    elif moment != "before":
        decoder.peer.offer("theirs")
        decoder.step_until(lambda: decoder.landing(name).ready)
        assert decoder.books() == (BLOCKS - 1 - 10, 10)
    if moment == "while it runs":
        decoder.step_until(lambda: decoder.request(name).num_output_tokens > 2)
    decoder.abort(name)
    assert decoder.books() == free
    assert decoder.run(again := decoder.engine.add(wanted, ANSWER)) == [alone]
    assert decoder.outputs[again].num_cached_tokens == found * BLOCK


def test_an_abort_between_a_step_that_takes_blocks_and_the_news_of_their_bytes(decoder: Decoder) -> None:
    wanted = prompt(31)
    alone = decoder.computed(wanted, "theirs")
    name = decoder.engine.add(wanted, ANSWER, land="theirs")
    decoder.peer.offer("theirs")
    decoder.engine.scheduler.schedule()
    assert len(decoder.landing(name).held()) == 10
    # As the step never runs, nothing may be found of it.
    decoder.connector._steps.clear()
    decoder.abort(name)
    assert decoder.run(again := decoder.engine.add(wanted, ANSWER)) == [alone]
    assert decoder.outputs[again].num_cached_tokens == 0


# Resets.

RESETS: dict[str, Callable[[InProcessEngine], Any]] = {
    "reset": lambda engine: engine.scheduler.reset_prefix_cache(True, True),
    "pause keep": lambda engine: engine.core.pause_scheduler("keep"),
    "pause abort": lambda engine: engine.core.pause_scheduler("abort"),
    "sleep": lambda engine: engine.core.sleep(1),
}
ENDS_REQUESTS = ("pause abort", "sleep")


@pytest.mark.parametrize("how", RESETS)
@pytest.mark.parametrize("gives_back", [True, False])
def test_resets_succeed_if_blocks_are_given_back_inside_the_pools_own_reset(
    decoder: Decoder, how: str, gives_back: bool
) -> None:
    """Blocks of a landing, and one that is held for no request, as a block that another engine reads."""
    wanted, other = prompt(40), prompt(41, 60)
    alone, other_alone = decoder.computed(wanted, "theirs"), decoder.computed(other, "other", 40)
    running = decoder.engine.add(other, 40)
    name = decoder.engine.add(wanted, ANSWER, land="theirs")
    decoder.peer.offer("theirs", 6, ended=False)
    decoder.step_until_written(name, 6)
    decoder.connector._sent += decoder.connector.take(1)
    resets = len(decoder.connector.resets)

    decoder.connector.gives_back_before_reset = gives_back
    try:
        if gives_back:
            assert RESETS[how](decoder.engine) in (None, True)
            assert decoder.connector.resets[resets:] == [1 if how in ENDS_REQUESTS else 7]
        else:
            with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
                RESETS[how](decoder.engine)
            assert decoder.connector.resets[resets:] == []
    finally:
        # Where it failed, the engine stays in its pause.
        assert (decoder.engine.scheduler.pause_state is PauseState.UNPAUSED) == (how == "reset")
        if how == "sleep" and gives_back:
            decoder.engine.core.wake_up()
        decoder.engine.core.resume_scheduler()

    assert decoder.lives(name) == decoder.lives(running) == (how not in ENDS_REQUESTS)
    if decoder.lives(name):
        decoder.peer.offer("theirs", 6)
        assert decoder.run(name, running) == [alone, other_alone]
        assert decoder.outputs[name].num_cached_tokens == (0 if gives_back else 6 * BLOCK)
    decoder.step(2)
    assert decoder.pool.reset_prefix_cache()


@pytest.mark.parametrize("others_run", [False, True])
def test_a_plain_reset_is_refused_while_others_run_and_then_costs_no_landing(
    decoder: Decoder, others_run: bool
) -> None:
    wanted = prompt(42)
    alone = decoder.computed(wanted, "theirs")
    running = decoder.engine.add(prompt(43, 60), 40) if others_run else None
    name = decoder.engine.add(wanted, ANSWER, land="theirs")
    decoder.peer.offer("theirs", 6, ended=False)
    decoder.step_until_written(name, 6)
    assert decoder.engine.llm.reset_prefix_cache() == (not others_run)
    decoder.peer.offer("theirs")
    assert decoder.run(name) == [alone]
    assert decoder.outputs[name].num_cached_tokens == (299 if others_run else 0)
    if running:
        decoder.run(running)


def test_a_paused_engine_steps_for_no_request_that_waits(decoder: Decoder) -> None:
    """A connector that says it has work keeps a paused engine stepping, and a served one's pause never ends."""
    name = decoder.engine.add(prompt(44), ANSWER, land="theirs")
    decoder.step()
    try:
        for state in PauseState:
            decoder.engine.scheduler.set_pause_state(state)
            assert decoder.engine.scheduler.has_requests() == (state is PauseState.UNPAUSED)
            decoder.connector.has_pending_push_work = lambda: True
            assert decoder.engine.scheduler.has_requests()
            del decoder.connector.has_pending_push_work
    finally:
        decoder.engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    decoder.abort(name)


# Room.


def test_versions_from_0_30_on_ask_for_blocks_before_they_preempt() -> None:
    """The hook came with the reports of failed requests; without it a connector has to look ahead."""
    assert hasattr(KVConnectorBase_V1, "get_transfer_results") == ASKS_BEFORE_PREEMPTION


@pytest.mark.parametrize("gives_up", ["when asked", "by room", "never"])
def test_a_running_request_is_preempted_unless_a_landing_is_given_up_for_it(
    decoder: Decoder, gives_up: str
) -> None:
    wanted, other = prompt(50, 400), prompt(51, 40)
    alone, other_alone = decoder.computed(wanted, "theirs"), decoder.computed(other, "other", 250)
    decoder.connector.gives_up = gives_up
    running = decoder.engine.add(other, 250)
    name = decoder.engine.add(wanted, ANSWER, land="theirs")
    decoder.peer.offer("theirs", 12, ended=False)
    decoder.step_until_written(name, 12)
    # All but one of the others: the running request wants seven more.
    full = decoder.connector.take(decoder.pool.get_num_free_blocks() - 1)
    request = decoder.request(running)
    decoder.step_until(lambda: request.num_preemptions > 0 or decoder.has_ended(running))
    asks_in_vain = gives_up == "when asked" and not ASKS_BEFORE_PREEMPTION
    assert bool(request.num_preemptions) == (gives_up == "never" or asks_in_vain)
    decoder.pool.free_blocks(full)
    decoder.peer.offer("theirs", 12)
    assert decoder.run(running, name) == [other_alone, alone]
