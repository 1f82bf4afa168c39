"""examples/prometheus parses as Prometheus wants it; tests/docs compares its metrics with those that there are.

In this folder because vLLM's environment has a YAML parser.
"""

from __future__ import annotations

from pathlib import Path

import yaml

RULES = Path(__file__).resolve().parents[2] / "examples/prometheus/kvlane-alerts.yaml"


def test_each_rule_has_a_name_an_expression_and_a_sentence() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    assert [group["name"] for group in groups] == ["kvlane", "kvlane-router", "kvlane-fleet"]
    *alerts, recorded = (group["rules"] for group in groups)
    assert all(len(rules) > 5 for rules in alerts)
    for rule in (rule for rules in alerts for rule in rules):
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule["labels"]) == {"severity"}
        assert rule["alert"].startswith("Kvlane")
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["annotations"]["summary"].endswith(".")
    for rule in recorded:
        assert set(rule) == {"record", "expr"}
        assert rule["record"].startswith("kvlane:")
