"""A request whose images have no names that say what they are shares its blocks with nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Engine, Request

from kvlane.connector.inputs import has_counted_inputs, names_are_content
from kvlane.testing import FakeCore

COUNTED = "renderer0-mm-1-image-0"
DIGEST = "0123456789abcdef" * 4


def request(request_id: str, *names: str) -> Request:
    """Its block hashes are of its tokens and of its images' names, as vLLM's are: here names that are equal."""
    made: Any = Request(request_id, list(range(100, 121)))
    made.mm_features = [SimpleNamespace(identifier=name) for name in names]
    return made


def run(engine: Engine, one: Request) -> int:
    """A request from its arrival to its end, saves included; gives the tokens that were loaded."""
    tokens = engine.run(one)
    engine.step({one.request_id: 0})
    engine.finish(one)
    for _ in range(3):
        engine.step()
    return tokens


def test_an_image_named_by_a_counter_is_not_taken_for_another_engines() -> None:
    """With prefix caching and the processor's cache off, vLLM names the first image of every engine alike. A question
    about one picture was answered from the blocks of another."""
    store = FakeCore()
    first, second = Engine(store), Engine(store, engine_id="second")
    assert run(first, request("a cat", COUNTED)) == 0
    assert run(second, request("a dog", COUNTED)) == 0
    assert run(second, request("no image")) == 0, "nothing was saved either"
    stats = [each.scheduler.take_stats() or {} for each in (first, second)]
    assert [each.get("unshared_requests", 0) for each in stats] == [1, 1]


def test_images_named_by_content_or_by_users_are_shared() -> None:
    for name in (DIGEST, "the user's own name", "image-17"):
        store = FakeCore()
        engine = Engine(store)
        assert run(engine, request("first", name)) == 0
        assert run(engine, request("again", name)) == 20


@pytest.mark.parametrize(
    ("name", "content", "counted"),
    [
        (COUNTED, True, True),
        (COUNTED, False, True),
        ("renderer12-mm-345-video_frames-6", False, True),
        ("an adapter:" + COUNTED, False, True),
        # The counter's name together with the processor's options, as one digest.
        (DIGEST, False, True),
        ("adapter:" + DIGEST, False, True),
        (DIGEST, True, False),
        ("a user's", False, False),
        ("sensor0-mm-1-image-0", False, False),
        ("", False, False),
    ],
)
def test_which_names_are_counted(name: str, content: bool, counted: bool) -> None:
    assert has_counted_inputs(request("r", "fine", name), content) == counted


def test_a_request_without_inputs_has_no_counted_ones() -> None:
    assert not has_counted_inputs(SimpleNamespace(), False)
    assert not has_counted_inputs(SimpleNamespace(mm_features=None), False)


def test_only_with_both_caches_off_vllm_counts() -> None:
    def names(gigabytes: float | None, prefix: bool) -> bool:
        multimodal = None if gigabytes is None else SimpleNamespace(mm_processor_cache_gb=gigabytes)
        model = SimpleNamespace(multimodal_config=multimodal)
        return names_are_content(
            SimpleNamespace(model_config=model, cache_config=SimpleNamespace(enable_prefix_caching=prefix))
        )

    assert names(4, True) and names(4, False) and names(0, True) and names(None, False)
    assert not names(0, False)
