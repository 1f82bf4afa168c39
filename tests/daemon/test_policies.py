"""A daemon with each replacement policy, under pressure: a pool that holds a part of what is saved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from processes import Daemon, Engine, run_kvlane, until

MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]

POLICIES = ["lru", "arc", "s3fifo", "sieve", "tinylfu", "wtinylfu", "learned", "auto"]
BLOCKS = 32


def policy_metrics(daemon: Daemon, metric: str) -> dict[str, float]:
    _, page = daemon.http("/metrics")
    found = re.findall(rf'^{metric}{{policy="(\w+)"}} (\S+)$', page, re.MULTILINE)
    return {policy: float(value) for policy, value in found}


def metric(daemon: Daemon, name: str) -> int:
    _, page = daemon.http("/metrics")
    (value,) = re.findall(rf"^{name} (\S+)$", page, re.MULTILINE)
    return int(value)


@pytest.mark.parametrize("policy", POLICIES)
def test_right_bytes_under_pressure(make_daemon: MakeDaemon, make_engine: MakeEngine, policy: str) -> None:
    # Room for 128 blocks of 16 KiB: four of ten prompts.
    daemon = make_daemon("--policy", policy, pool="2mib")
    engine = make_engine(daemon, "engine")
    engine.wait_connected()
    hits = 0
    for step in range(60):
        # The first two prompts are asked for every other time.
        prompt = f"prompt-{step // 2 % 2 if step % 2 == 0 else 2 + step // 2 % 8}"
        end = engine.call("check", prompt=prompt, count=BLOCKS)
        assert end["ok"]
        assert end["wrong"] == []
        hits += end["blocks"]
        assert engine.call("save", prompt=prompt, count=BLOCKS)["ok"]
        daemon.settle()
    assert hits > 0
    status = daemon.wait_unused()
    assert status["policy"] == policy
    assert 0 < status["blocks"] <= 128
    out = metric(daemon, "kvlane_evicted_blocks_total") + metric(
        daemon, "kvlane_save_not_admitted_blocks_total"
    )
    assert out > 0
    assert metric(daemon, "kvlane_save_no_room_blocks_total") == 0
    at_work = policy_metrics(daemon, "kvlane_replacement_policy")
    assert sorted(at_work) == sorted(POLICIES[:-1])
    assert [name for name, value in at_work.items() if value] == [status["active_policy"]]
    shadows = policy_metrics(daemon, "kvlane_policy_shadow_hit_ratio")
    if policy == "auto":
        assert sorted(shadows) == sorted(POLICIES[:-1])
        until("the shadows have seen the lookups", lambda: max(status_shadows(daemon).values()) > 0)
    else:
        assert shadows == {}
        assert status["active_policy"] == policy
    shown = run_kvlane("status", "--addr", daemon.address).stdout
    assert re.search(rf"^policy +{policy}", shown, re.MULTILINE)
    engine.call("close")


def status_shadows(daemon: Daemon) -> dict[str, float]:
    return json.loads(run_kvlane("status", "--addr", daemon.address, "--json").stdout)["shadow_hit_ratios"]


def test_a_policy_that_does_not_exist_is_named() -> None:
    ended = run_kvlane("serve", "--policy", "best")
    assert ended.returncode != 0
    assert "'best'" in ended.stderr
    assert "wtinylfu" in ended.stderr
