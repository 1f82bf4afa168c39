"""examples/prometheus parses as Prometheus wants it; tests/docs compares its metrics with those that there are.

In this folder because vLLM's environment has a YAML parser.
"""

from __future__ import annotations

from pathlib import Path

import yaml

RULES = Path(__file__).resolve().parents[2] / "examples/prometheus/kvlane-alerts.yaml"


def test_each_rule_has_a_name_an_expression_and_a_sentence() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    assert [group["name"] for group in groups] == ["kvlane", "kvlane-router"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert all(len(group["rules"]) > 5 for group in groups)
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule["labels"]) == {"severity"}
        assert rule["alert"].startswith("Kvlane")
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["annotations"]["summary"].endswith(".")
