"""What tests of two real engines that hand over directly ask of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine import InProcessEngine

if TYPE_CHECKING:
    from prefill_engine import PrefillEngine

DIRECT = {"kvlane.direct": "on"}
STEPS_SECONDS = 60


def both_params(p: PrefillEngine) -> tuple[dict[str, object], dict[str, object]]:
    """For P's request and for D's, which are sent at once."""
    handoff = secrets.token_hex(16)
    prefill = {"do_remote_decode": True, "kvlane": {"handoff": handoff}}
    return prefill, {"kvlane": {"handoff": handoff, "peer": p.address}}


def wait_until(what: str, is_so: Callable[[], bool], meanwhile: Callable[[], object]) -> None:
    """Do something again and again until it is so."""
    deadline = time.monotonic() + STEPS_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, what
        meanwhile()


def step_until(d: InProcessEngine, what: str, is_so: Callable[[], bool]) -> None:
    wait_until(what, is_so, d.llm.llm_engine.step)


def land_kind(d: InProcessEngine) -> Any:
    (kind,) = (kind for kind in d.connector._scheduler.kinds if kind.name == "land")
    return kind


def landed_blocks(d: InProcessEngine) -> int:
    """Of all landings that go on."""
    kind, agent = land_kind(d), d.connector._scheduler.direct.agent
    standings = [agent.standing(handoff) for handoff in kind._landings]
    return sum(standing[2] for standing in standings if standing is not None)


def answer(d: InProcessEngine, name: str) -> tuple[list[int], int]:
    output = d.run()[name]
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def two_samples(engine: InProcessEngine, prompt: list[int], tokens: int, params: dict[str, object]) -> str:
    """Queue a request for two samples, each the greedy one; gives its name."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        n=2,
        top_k=1,
        max_tokens=tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": params},
    )
    name = f"samples-{secrets.token_hex(4)}"
    engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
    return name


def interrupt(engine: InProcessEngine, how: str, names: list[str]) -> None:
    """`how`: "sleep", or "pause" and what becomes of requests, which are these. Either clears the engine's cache."""
    if how == "sleep":
        engine.llm.sleep(level=1)
        engine.llm.wake_up()
    else:
        engine.core.pause_scheduler(how.removeprefix("pause "))
        engine.core.resume_scheduler()
    if how in ("sleep", "pause abort"):
        # vLLM tells its frontend only when that is another process.
        engine.llm.llm_engine.abort_request(names)
