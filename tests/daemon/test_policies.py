"""A daemon with each replacement policy, under pressure: a pool that holds a part of what is saved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Daemon, Engine, run_kvlane, until

MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]

POLICIES = ["lru", "arc", "wtinylfu", "learned", "auto"]
# The policies that auto compares, including those that serve does not offer by name.
COMPARED = ["lru", "arc", "s3fifo", "sieve", "tinylfu", "wtinylfu", "learned"]
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
    assert sorted(at_work) == sorted(COMPARED)
    assert [name for name, value in at_work.items() if value] == [status["active_policy"]]
    shadows = policy_metrics(daemon, "kvlane_policy_shadow_hit_ratio")
    if policy == "auto":
        assert sorted(shadows) == sorted(COMPARED)
        until("the shadows have seen the lookups", lambda: max(status_shadows(daemon).values()) > 0)
    else:
        assert shadows == {}
        assert status["active_policy"] == policy
    shown = run_kvlane("status", "--addr", daemon.address).stdout
    assert re.search(rf"^policy +{policy}", shown, re.MULTILINE)
    engine.call("close")


def status_shadows(daemon: Daemon) -> dict[str, float]:
    return json.loads(run_kvlane("status", "--addr", daemon.address, "--json").stdout)["shadow_hit_ratios"]


def test_learned_says_what_it_has_learnt_and_the_ssd_goes_by_it(
    make_daemon: MakeDaemon, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """A pool of 64 blocks over an SSD of 800: one prompt comes back all the time, 41 come back too late for the SSD."""
    daemon = make_daemon("--policy", "learned", "--ssd", f"{tmp_path}/blocks:16mib", pool="1mib")
    engine = make_engine(daemon, "engine")
    engine.wait_connected()
    often = 0
    for step in range(250):
        # As many blocks as a cleaning of the SSD can write again.
        prompt, count = ("often", 8) if step % 5 == 0 else (f"prompt-{step % 41}", BLOCKS)
        end = engine.call("check", prompt=prompt, count=count)
        assert end["ok"]
        assert end["wrong"] == []
        often += end["blocks"] == 8 and prompt == "often"
        assert engine.call("save", prompt=prompt, count=count)["ok"]
        daemon.settle()
        if step == 20:
            # The SSD has room for all that comes, so nothing is kept out of the pool, by which it gets there.
            assert metric(daemon, "kvlane_save_not_admitted_blocks_total") == 0
    # So few blocks teach little, so the policy may give the block up at times.
    assert often >= 40
    assert metric(daemon, "kvlane_ssd_dropped_blocks_total") > 0, "the SSD was never full"
    assert metric(daemon, "kvlane_ssd_kept_blocks_total") > 0
    told = json.loads(run_kvlane("status", "--addr", daemon.address, "--json").stdout)
    kinds = {kind["blocks"]: dict(map(tuple, kind["density_by_age"])) for kind in told["learnt"]}
    used = [
        densities[0] for blocks, densities in kinds.items() if blocks.startswith("asked for 9 to 16 times")
    ]
    once = [densities[0] for blocks, densities in kinds.items() if blocks.startswith("asked for once")]
    assert max(used) > 2 * max(once), kinds
    shown = run_kvlane("status", "--addr", daemon.address).stdout
    assert re.search(r"^  asked for .* times, .* references apart +\d+ +\d", shown, re.MULTILINE), shown
    densities = policy_kinds(daemon)
    assert densities.keys() == kinds.keys()
    engine.call("close")


def policy_kinds(daemon: Daemon) -> dict[str, float]:
    _, page = daemon.http("/metrics")
    found = re.findall(r'^kvlane_policy_learned_hit_density{blocks="([^"]+)"} (\S+)$', page, re.MULTILINE)
    return {blocks: float(value) for blocks, value in found}


@pytest.mark.parametrize("policy", ["best", "s3fifo", "sieve", "tinylfu"])
def test_a_policy_that_is_not_offered_is_named(policy: str) -> None:
    ended = run_kvlane("serve", "--policy", policy)
    assert ended.returncode != 0
    assert f"'{policy}'" in ended.stderr
    assert "offers lru, arc, wtinylfu, learned and auto; kvlane replay has" in ended.stderr
