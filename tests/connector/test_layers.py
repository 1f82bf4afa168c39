"""How far a forward pass is."""

from __future__ import annotations

from kvlane.connector.layers import Layers


def told_of(layers: Layers, names: str) -> list[int]:
    told: list[int] = []
    done = layers.begin(told.append)
    for name in names:
        done(name)
    return told


def test_each_layer_in_its_order_tells_the_regions_up_to_its_last_one() -> None:
    assert told_of(Layers({"a": 0, "b": 2, "c": 3}), "abc") == [1, 3, 4]


def test_a_layer_before_its_turn_counts_when_those_before_it_are_done() -> None:
    assert told_of(Layers({"a": 0, "b": 1, "c": 2}), "bac") == [2, 3]
    assert told_of(Layers({"a": 0, "b": 1, "c": 2}), "bc") == []


def test_a_layer_that_reads_anothers_cache_changes_nothing() -> None:
    assert told_of(Layers({"a": 0, "b": 0, "c": 1}), "abc") == [1, 1, 2]


def test_each_step_begins_anew_and_a_layer_nobody_knows_is_passed_over() -> None:
    layers = Layers({"a": 0, "b": 1})
    assert told_of(layers, "ab") == told_of(layers, "axb") == [1, 2]
