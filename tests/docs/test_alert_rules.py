"""The alert rules as Prometheus evaluates them: each has a case in which it fires, and one in which it must not.

`promtool` is fetched by scripts/promtool.py.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from monitored import program
from pages import ROOT, read

RULES = ROOT / "examples/prometheus/kvlane-alerts.yaml"
SEVERITIES = ("critical", "warning", "info")

# As the operator for Prometheus calls the job of a PodMonitor, and as a file calls it.
POD = '{job="prod/kvlane", instance="10.0.0.1:9091"}'
FILE = '{job="kvlane", instance="host:9091"}'
ROUTER_POD = '{job="prod/kvlane-router", instance="10.0.0.2:9092"}'
ROUTER_FILE = '{job="kvlane-router", instance="host:9092"}'
REQUESTS = "kvlane_route_requests_total"
FIRST = "kvlane_route_time_to_first_token_seconds_bucket"


@dataclass(frozen=True)
class Case:
    """Series, as promtool writes them, one value a minute; and the minute at which the alert has to fire, or not."""

    fires: dict[str, str]
    silent: dict[str, str]
    minute: int


def statuses(good: str, bad: str) -> dict[str, str]:
    labels = 'job="kvlane-router", instance="a", route="/v1/completions", node="n", model="m"'
    return {
        f'{REQUESTS}{{{labels}, status="200"}}': good,
        f'{REQUESTS}{{{labels}, status="503"}}': bad,
    }


def first_tokens(within_5: str, within_40: str) -> dict[str, str]:
    labels = 'job="kvlane-router", instance="a", route="/v1/completions", node="n", model="m"'
    bounds = {"5": within_5, "10": within_5, "40": within_40, "+Inf": within_40}
    return {f'{FIRST}{{{labels}, le="{bound}"}}': values for bound, values in bounds.items()}


CASES: dict[str, list[Case]] = {
    "KvlaneIsDown": [
        Case({f"up{POD}": "1 0x9"}, {f"up{POD}": "1x9"}, 5),
        Case({f"up{FILE}": "0x9"}, {f"up{ROUTER_FILE}": "0x9"}, 5),
    ],
    "KvlaneIsAbsent": [
        Case({f"up{ROUTER_POD}": "1x20"}, {f"up{POD}": "1x20"}, 10),
        Case({f"up{POD}": "1 1 _x20"}, {f"up{FILE}": "0x20"}, 15),
    ],
    "KvlaneHasFewerDaemons": [
        Case(
            {f"up{POD}": "1x90", 'up{job="prod/kvlane", instance="10.0.0.9:9091"}': "1x30 _x60"},
            # One series takes the place of the other, as at an upgrade.
            {f"up{POD}": "1x30 _x60", 'up{job="prod/kvlane", instance="10.0.0.9:9091"}': "_x31 1x60"},
            80,
        )
    ],
    "KvlaneHasNoEngines": [
        Case(
            {'kvlane_sessions{instance="a", role="worker"}': "0x30"},
            {'kvlane_sessions{instance="a", role="worker"}': "0x10 2x20"},
            20,
        )
    ],
    "KvlaneRefusesEngines": [
        Case(
            {'kvlane_requests_refused_total{instance="a", call="Hello"}': "_x20 1x20"},
            {'kvlane_requests_refused_total{instance="a", call="Lookup"}': "0+1x40"},
            25,
        ),
        Case(
            {'kvlane_requests_refused_total{instance="a", call="RegisterWorker"}': "1x30 2x30"},
            {'kvlane_requests_refused_total{instance="a", call="RegisterWorker"}': "1x60"},
            40,
        ),
    ],
    "KvlaneKeepsNothing": [
        Case(
            {'kvlane_save_no_room_blocks_total{instance="a"}': "0+5x60"},
            {'kvlane_save_no_room_blocks_total{instance="a"}': "0+5x20 100x40"},
            45,
        )
    ],
    "KvlaneMemoryIsDamaged": [
        Case(
            {'kvlane_scrub_bad_blocks_total{instance="a"}': "0x30 1x30"},
            {'kvlane_scrub_bad_blocks_total{instance="a"}': "1x60"},
            40,
        )
    ],
    "KvlaneSsdIsDamaged": [
        Case(
            {'kvlane_ssd_damaged_blocks_total{instance="a"}': "0x30 1x30"},
            {'kvlane_ssd_damaged_blocks_total{instance="a"}': "1x60"},
            40,
        )
    ],
    "KvlaneSsdTakesNoWrites": [
        Case(
            {'kvlane_ssd_degraded{instance="a", device="/ssd"}': "1x20"},
            {'kvlane_ssd_degraded{instance="a", device="/ssd"}': "1x2 0x20"},
            10,
        )
    ],
    "KvlaneTurnsConnectionsAway": [
        Case(
            {'kvlane_connections_turned_away_total{instance="a", door="http"}': "0+9x30"},
            {'kvlane_connections_turned_away_total{instance="a", door="http"}': "9x30"},
            20,
        )
    ],
    "KvlaneEngineWithoutDaemon": [
        Case(
            {'vllm:kvlane_unavailable_total{instance="a"}': "0+9x30"},
            {'vllm:kvlane_unavailable_total{instance="a"}': "0 9x30"},
            15,
        )
    ],
    "KvlaneLoadsFail": [
        Case(
            {'vllm:kvlane_failed_loads_total{instance="a"}': "0x10 1x20"},
            {'vllm:kvlane_failed_loads_total{instance="a"}': "1x30"},
            15,
        )
    ],
    "KvlaneConnectorFails": [
        Case(
            {'vllm:kvlane_errors_total{instance="a"}': "0x10 1x20"},
            {'vllm:kvlane_errors_total{instance="a"}': "1x30"},
            15,
        )
    ],
    "KvlaneRouterIsDown": [
        Case({f"up{ROUTER_POD}": "1 0x9"}, {f"up{ROUTER_POD}": "1x9"}, 5),
        Case({f"up{ROUTER_FILE}": "0x9"}, {f"up{FILE}": "0x9"}, 5),
    ],
    "KvlaneRouterIsAbsent": [Case({f"up{POD}": "1x20"}, {f"up{ROUTER_POD}": "1x20"}, 10)],
    "KvlaneHasFewerRouters": [
        Case(
            {
                f"up{ROUTER_POD}": "1x90",
                'up{job="prod/kvlane-router", instance="10.0.0.8:9092"}': "1x30 _x60",
            },
            {f"up{ROUTER_POD}": "1x90", 'up{job="prod/kvlane", instance="10.0.0.8:9091"}': "1x30 _x60"},
            80,
        ),
        Case(
            {f"up{ROUTER_FILE}": "1x90", 'up{job="kvlane-router", instance="other:9092"}': "1x30 _x60"},
            # One series takes the place of the other, as at an upgrade.
            {
                f"up{ROUTER_POD}": "1x30 _x60",
                'up{job="prod/kvlane-router", instance="10.0.0.8:9092"}': "_x31 1x60",
            },
            80,
        ),
    ],
    "KvlaneRouterHasNoReadyNode": [
        Case(
            {
                'kvlane_route_node_ready{job="r", instance="a", node="n"}': "1 0x20",
                'kvlane_route_connections{job="r", instance="a"}': "3x20",
            },
            {
                'kvlane_route_node_ready{job="r", instance="a", node="n"}': "1x20",
                'kvlane_route_node_ready{job="r", instance="a", node="m"}': "0x20",
                'kvlane_route_connections{job="r", instance="a"}': "3x20",
            },
            10,
        ),
        Case(
            {'kvlane_route_connections{job="r", instance="a"}': "3x20"},
            {'kvlane_route_node_ready{job="r", instance="a", node="n"}': "0 1x20"},
            10,
        ),
    ],
    "KvlaneRouterLeavesNodesAlone": [
        Case(
            {'kvlane_route_node_open{instance="a", node="n"}': "1x20"},
            {'kvlane_route_node_open{instance="a", node="n"}': "1x3 0 1x3 0x9"},
            10,
        )
    ],
    "KvlaneRouterAnswersErrors": [
        Case(statuses("0+90x30", "0+10x30"), statuses("0+990x30", "0+10x30"), 20),
        Case(statuses("0x30", "0+1x30"), statuses("0+1x30", "0x30"), 20),
    ],
    "KvlaneRouterRetries": [
        Case(
            {**statuses("0+50x40", "0x40"), 'kvlane_route_retries_total{job="kvlane-router"}': "0+10x40"},
            {**statuses("0+500x40", "0x40"), 'kvlane_route_retries_total{job="kvlane-router"}': "0+10x40"},
            30,
        )
    ],
    "KvlaneRouterFirstTokensAreLate": [
        Case(first_tokens("0+80x40", "0+100x40"), first_tokens("0+99x40", "0+100x40"), 30)
    ],
    "KvlaneRouterShedsRequests": [
        Case(
            {'kvlane_route_shed_total{instance="a"}': "0+9x30"},
            {'kvlane_route_shed_total{instance="a"}': "9x30"},
            20,
        )
    ],
}


def verdict(folder: Path, alert: str, series: dict[str, str], minute: int, severity: str | None) -> str:
    """Promtool's complaint; "" if the alert fires at this minute with this severity, or, without one, does not fire."""
    labels = f'alertname="{alert}", alertstate="firing"' + (f', severity="{severity}"' if severity else "")
    wanted = {"{}": 1.0} if severity else {}
    return answer(folder, series, f"count(ALERTS{{{labels}}}) > 0", minute, wanted)


def answer(
    folder: Path, series: dict[str, str], expression: str, minute: int, wanted: dict[str, float]
) -> str:
    """Promtool's complaint; "" if the expression has these values, by their labels, at this minute."""
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expression,
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in wanted.items()],
            }
        ],
    }
    tests = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}
    file = folder / "test.json"
    file.write_text(json.dumps(tests))
    done = subprocess.run(
        [str(program("promtool")), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def rules() -> dict[str, str]:
    """Alerts and their severities."""
    return dict(
        re.findall(r"- alert: (\w+)\n(?:(?!- alert).*\n)*? *labels: \{severity: (\w+)\}", read_rules())
    )


def read_rules() -> str:
    return read("examples/prometheus/kvlane-alerts.yaml")


def test_every_rule_has_a_severity_and_cases() -> None:
    """No rule said how urgent it is, so each user had to decide which alerts wake somebody up."""
    assert re.findall(r"- alert: (\w+)", read_rules()) == list(rules()) == list(CASES)
    assert set(rules().values()) == set(SEVERITIES)


@pytest.mark.parametrize("alert", CASES)
def test_it_fires_when_it_should_and_not_when_it_should_not(alert: str, tmp_path: Path) -> None:
    severity = rules()[alert]
    for case in CASES[alert]:
        assert verdict(tmp_path, alert, case.fires, case.minute, severity) == ""
        assert verdict(tmp_path, alert, case.silent, case.minute, None) == ""


def test_a_rule_that_stays_silent_is_noticed(tmp_path: Path) -> None:
    """The control: the same questions with the other answers."""
    case = CASES["KvlaneIsDown"][0]
    assert "got:" in verdict(tmp_path, "KvlaneIsDown", case.silent, case.minute, "critical")
    assert "got:" in verdict(tmp_path, "KvlaneIsDown", case.fires, case.minute, None)


@dataclass(frozen=True)
class Looked:
    """The hits of a daemon in a window. All shares are sums of powers of 2, because promtool compares them exactly."""

    instance: str
    blocks: int
    hits: float
    ceiling: float
    window: str = "1h"
    job: str = "kvlane"

    def series(self) -> dict[str, str]:
        labels = f'{{job="{self.job}", instance="{self.instance}", window="{self.window}"}}'
        return {
            f"kvlane_hit_window_blocks{labels}": f"{self.blocks}x10",
            f"kvlane_hit_ratio{labels}": f"{self.hits}x10",
            f"kvlane_hit_ceiling_ratio{labels}": f"{self.ceiling}x10",
        }


BUSY = Looked("busy", 300, hits=0.25, ceiling=0.75)
CALM = Looked("calm", 100, hits=0.75, ceiling=1.0)
HOUR = '{job="kvlane", window="1h"}'
HITS, CEILING = "kvlane:hit_ratio:fleet", "kvlane:hit_ceiling_ratio:fleet"
RECORDED = (HITS, CEILING)


def recorded(
    folder: Path, name: str, looked: list[Looked], wanted: dict[str, float], idle: str | None = None
) -> str:
    """Promtool's complaint; "" if a rule records these values, by their labels. An idle daemon has no hits at all."""
    series = {name: values for each in looked for name, values in each.series().items()}
    if idle is not None:
        series[f'up{{job="kvlane", instance="{idle}"}}'] = "1x10"
    return answer(folder, series, name, 5, {f"{name}{labels}": value for labels, value in wanted.items()})


@pytest.mark.parametrize(("name", "of_both", "unweighted"), [(HITS, 0.375, 0.5), (CEILING, 0.8125, 0.875)])
def test_the_hits_of_a_fleet_are_weighted_by_lookups(
    name: str, of_both: float, unweighted: float, tmp_path: Path
) -> None:
    assert recorded(tmp_path, name, [BUSY, CALM], {HOUR: of_both}) == ""
    # The control: a mean without weights is another number, and promtool would notice it.
    ratio = "kvlane_hit_ratio" if name == HITS else "kvlane_hit_ceiling_ratio"
    series = {**BUSY.series(), **CALM.series()}
    assert answer(tmp_path, series, f"avg by (job, window) ({ratio})", 5, {HOUR: unweighted}) == ""
    assert "got:" in recorded(tmp_path, name, [BUSY, CALM], {HOUR: unweighted})


@pytest.mark.parametrize(("name", "share"), [(HITS, BUSY.hits), (CEILING, BUSY.ceiling)])
def test_a_daemon_without_lookups_does_not_count(name: str, share: float, tmp_path: Path) -> None:
    assert recorded(tmp_path, name, [BUSY], {HOUR: share}, idle="idle") == ""
    assert recorded(tmp_path, name, [], {}, idle="idle") == ""


@pytest.mark.parametrize(("name", "share"), [(HITS, BUSY.hits), (CEILING, BUSY.ceiling)])
def test_windows_and_jobs_are_recorded_each_for_itself(name: str, share: float, tmp_path: Path) -> None:
    apart = [
        BUSY,
        Looked("busy", 8, hits=0.5, ceiling=0.5, window="15m"),
        Looked("10.0.0.1:9091", 8, hits=1.0, ceiling=1.0, job="prod/kvlane"),
    ]
    wanted = {
        HOUR: share,
        '{job="kvlane", window="15m"}': 0.5,
        '{job="prod/kvlane", window="1h"}': 1.0,
    }
    assert recorded(tmp_path, name, apart, wanted) == ""


def test_each_recording_rule_has_cases() -> None:
    assert tuple(re.findall(r"- record: (\S+)", read_rules())) == RECORDED
