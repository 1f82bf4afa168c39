"""bench/gpu: every result names the GPU, its driver, the commit and the packages, and engines spawn their workers.

The engines are played: real ones need vLLM."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "gpu"

GPU = "NVIDIA H200, 570.133.20"
TINY = ["--shape", "tiny"]
# Script, the file that it writes, and its arguments.
SCRIPTS = {
    "bits": ("bits.json", [*TINY, "--engines", "1"]),
    "burst": ("burst.json", TINY),
    "compare": ("gpu.json", [*TINY, "--systems", "kvlane", "--modes", "eager"]),
    "handoff": ("direct.json", TINY),
    "hits": ("hits.json", [*TINY, "--engines", "1"]),
    "moe_serve": ("moe-serve.json", TINY),
    "nixl_connector": ("nixl.json", TINY),
    "parallel": ("parallel.json", [*TINY, "--tensor-parallel", "2"]),
    "ranks": ("ranks.json", TINY),
    "rates": ("rates.json", TINY),
    "restart": ("restart.json", [*TINY, "--modes", "eager"]),
    "shared_pool": ("shared-pool.json", TINY),
    "starts": ("starts.json", [*TINY, "--rounds", "1"]),
    "steps": ("steps.json", TINY),
    "turns": ("turns.json", [*TINY, "--systems", "kvlane"]),
}
STARTS_WORKERS = (
    "bits",
    "burst",
    "handoff",
    "hits",
    "nixl_connector",
    "parallel",
    "rates",
    "shared_pool",
    "steps",
    "turns",
)


class Played:
    """The parts of a script that engines would do."""

    def __init__(self, module: ModuleType, patch: pytest.MonkeyPatch) -> None:
        self.started_with: list[dict[str, str]] = []
        parts: dict[str, Any] = {
            "start": self.start,
            "running": lambda *_: contextlib.nullcontext(),
            "daemon": lambda *_: contextlib.nullcontext(),
            "measure": self.measure,
            "loads": self.measure,
            "all_engines": lambda *_: [],
            "table": lambda *_: "",
            "controls_hold": lambda *_: True,
            "differences": lambda _: {
                "by_engine": {},
                "kvlane_adds_ms": 0,
                "same_kind_differs_by_ms": {},
            },
            "_run": lambda *_: {"ready_s": 1.0, "cold": {"p50": 2.0}, "in_gpu": {"p50": 1.0}},
        }
        if module.__name__ == "restart":
            parts |= {"Daemon": lambda *_: None, "measure": self.fail}
        if module.__name__ == "rates":
            parts |= {"measure": self.no_rates}
        if module.__name__ == "turns":
            parts |= {"measure": self.no_turns}
        if module.__name__ == "bits":
            parts |= {"measure": self.no_bits}
        if module.__name__ == "burst":
            parts |= {"measure": self.no_bursts}
        if module.__name__ == "moe_serve":
            parts |= {"run": lambda *_: {"answers": [], "tpot": {"p50": 1.0}}}
        if module.__name__ == "shared_pool":
            parts |= {"all_rounds": self.one_round}
        if module.__name__ in ("burst", "nixl_connector", "rates"):
            parts |= {"on_own_gpu": self.one_of_two, "start_one": self.one_of_two}
        for name in parts.keys() & vars(module).keys():
            patch.setattr(module, name, parts[name])

    def start(self, *_: object) -> tuple[Any, float]:
        self.started_with.append(dict(os.environ))
        return SimpleNamespace(shutdown=lambda: None, _llm=SimpleNamespace(shutdown=lambda: None)), 1.0

    def one_of_two(self, *_: object) -> Any:
        return self.start()[0]

    async def no_rates(self, *_: object) -> list[dict[str, Any]]:
        return []

    async def no_turns(self, *_: object) -> dict[str, Any]:
        return {"kvlane": {}}

    async def no_bits(self, *_: object) -> dict[str, Any]:
        names = ("distinct", "same_again", "own_blocks", "loaded", "other_bytes")
        return {"by_engine": [{}]} | {f"control_{name}": True for name in names}

    async def no_bursts(self, *_: object) -> dict[str, Any]:
        burst = {"ttft": {"mean": 1.0}, "last_token": {"mean": 1.0}, "itl": {"p99": 1.0}}
        bursts = {mode: [burst] for mode in ("overflow", "waits", "computed")}
        return {"bursts": bursts, "tokens_alike_when_asked_again": [1]}

    async def one_round(self, *_: object) -> dict[str, list[dict[str, Any]]]:
        figures = {"requests_per_s": 1.0, "request_hit_rate": 0.5, "ttft_mean": 1.0}
        names = ("same_tokens", "control_distinct", "control_loaded", "control_pools")
        return {mode: [figures | dict.fromkeys(names, True)] for mode in ("shared", "isolated")}

    async def measure(self, *_: object) -> dict[str, Any]:
        return {
            "loaded_by_link_bytes": {},
            "pool_used_bytes": 1,
            "warm": {"p50": 1.0},
            "same_tokens": True,
            "control_distinct": True,
            "ttft": {"alone": {"p50": 9.0}, "one after the other": {"p50": 10.0}},
            "decode_engines_part": {"p50": 2.0},
        }

    def fail(self, *_: object) -> None:
        raise RuntimeError("there is no engine")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_script: Callable[[str], Any]) -> Iterator[Path]:
    """A folder under git on a host with one GPU; gives the folder of its programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "{GPU}"\n')
    (programs / "nvidia-smi").chmod(0o755)
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    yield programs
    os.environ.clear()
    os.environ.update(before)


def result(script: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[dict[str, Any], Played]:
    file, arguments = SCRIPTS[script]
    module = importlib.import_module(script)
    played = Played(module, monkeypatch)
    size = ["--requests", "100:10"] if script == "rates" else ["--tokens", "100"]
    monkeypatch.setattr(sys, "argv", [script, *arguments, *more, *size, "--out", "results"])
    module.main()
    return json.loads((Path("results") / file).read_text()), played


def test_every_script_that_writes_results_is_here() -> None:
    writing = {path.stem for path in FOLDER.glob("*.py") if "report.write_json(" in path.read_text()}
    assert writing == SCRIPTS.keys()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_result_says_what_took_part(script: str, host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of eight scripts named neither the GPU nor the commit, so their figures could not be measured again."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    written, _ = result(script, monkeypatch)
    assert written["host"]["gpus"] == ["NVIDIA H200"]
    assert written["host"]["driver"] == "570.133.20"
    assert written["commit"] == commit.stdout.strip()
    assert written["date"] and written["benchmark"]
    assert "kvlane" in written["versions"]
    assert not {"out", "scratch", "commit"} & written["settings"].keys()


@pytest.mark.parametrize("script", STARTS_WORKERS)
def test_workers_are_spawned(script: str, host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable had a name that vLLM does not know, so workers were forked from a process with threads."""
    _, played = result(script, monkeypatch)
    assert played.started_with
    for environment in played.started_with:
        assert environment.get("VLLM_WORKER_MULTIPROC_METHOD") == "spawn"


def test_only_gpus_that_the_process_may_use_are_named(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
    result("steps", monkeypatch)
    assert "--id=2,3" in Path("asked").read_text()


def test_without_a_commit_nothing_is_measured(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host.parent / ".git").rename(host.parent / "no-git")
    os.environ["GIT_CEILING_DIRECTORIES"] = str(host.parent.parent)
    with pytest.raises(SystemExit, match="give it with --commit"):
        result("steps", monkeypatch)
    written, _ = result("steps", monkeypatch, "--commit", "abc1234")
    assert written["commit"] == "abc1234"


def test_without_a_gpu_the_result_says_so(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (host / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    written, _ = result("steps", monkeypatch)
    assert (written["host"]["gpus"], written["host"]["driver"]) == ([], None)
    assert "nvidia-smi names no GPU" in capsys.readouterr().err


def test_engines_that_share_a_pool_get_a_gpu_each(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host / "nvidia-smi").write_text(f'#!/bin/sh\necho "{GPU}"\necho "{GPU}"\n')
    _, played = result("shared_pool", monkeypatch, "--engines", "3")
    assert [each["CUDA_VISIBLE_DEVICES"] for each in played.started_with] == ["0", "1", "0"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
