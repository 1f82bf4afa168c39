"""Engines with the configurations of vLLM's guide to its P2P NCCL connector, behind a proxy like the guide's, and
behind `kvlane route`."""

from __future__ import annotations

from pathlib import Path

import p2p_engines
import pytest
from p2p_engines import check_prompts


def test_a_pair_serves_behind_the_guides_proxy(tmp_path: Path) -> None:
    with p2p_engines.engines(tmp_path, 1, 1) as engines:
        with p2p_engines.proxy(engines, tmp_path / "proxy.log") as url:
            check_prompts(engines, url, "a pair", 4)
        # The next one at its address gets pings too.
        with p2p_engines.router(engines, tmp_path / "route.log") as url:
            check_prompts(engines, url, "a pair behind route", 4)
        for each in engines.all:
            assert each.complaints() == []
        said = engines.prefill[0].log.read_text()
        assert "direct hand-offs are on, because the configuration has" in said
        assert f"pings to 127.0.0.1:{engines.ping_port}: P" in said
        assert f"direct hand-offs by 127.0.0.1:{engines.kv_ports[engines.prefill[0].url]}" in said


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 3), (3, 1)])
def test_the_guides_examples_serve(prefill: int, decode: int, tmp_path: Path) -> None:
    with p2p_engines.engines(tmp_path, prefill, decode) as engines:
        with p2p_engines.proxy(engines, tmp_path / "proxy.log") as url:
            check_prompts(engines, url, "proxy")
        with p2p_engines.router(engines, tmp_path / "route.log") as url:
            check_prompts(engines, url, "route")
        for each in engines.all:
            assert each.complaints() == []
