"""The demo of prefill and decode engines: its judgement, what it refuses to start, and that nothing of it is left. Its
engines are fakes here."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvlane.bench import pictures
from kvlane.bench.processes import free_port
from kvlane.demo.pd import plan, processes, results
from kvlane.demo.pd.asking import Answer, AskFailed, PromptTokens, counted, read_prompt_tokens
from kvlane.demo.pd.comparing import Comparing
from kvlane.demo.scenarios import Scenario

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import run_pd  # noqa: E402

GIB = 1 << 30
# Stands for `vllm`: the flags of `vllm serve` that a fake engine knows, or an end at once.
FAKE_VLLM = """#!{python}
import os, sys
if {ends}:
    sys.exit(3)
words = sys.argv[1:]
value = lambda flag: words[words.index(flag) + 1]
engine = [sys.executable, "-m", "kvlane.testing.fake_engine", "--port", value("--port"), "--model", "demo"]
os.execv(sys.executable, engine)
"""


def free_ports() -> int:
    """The first of five free ports in a row, below those that the kernel gives to what other tests start."""
    for _ in range(100):
        first = random.randrange(20_000, 32_000)
        try:
            with ExitStack() as stack:
                for port in range(first, first + 5):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
        except OSError:
            continue
    raise AssertionError("no five ports in a row are free")


def planned(prefill: int = 1, decode: int = 1) -> plan.Plan:
    return plan.plan(prefill, decode, free_ports(), free_ports())


def test_a_taken_port_of_an_engine_is_refused_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            plan.NotPossible, match=rf"port {port} is taken, and D1 .*ss -ltnp.*--decode-port"
        ):
            plan.plan(1, 1, free_ports(), port)
        with pytest.raises(plan.NotPossible, match=r"--prefill-port"):
            plan.plan(1, 1, port, free_ports())


def test_a_taken_port_of_the_router_is_replaced_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(plan, "ROUTER_PORT", port)
        monkeypatch.setattr(plan, "ADMIN_PORT", free_port())
        found = planned()
        assert found.router_port != port
        assert found.notes == [f"port {port} is taken: clients are served at port {found.router_port}"]
    assert planned().notes == [], "the control: a free one is kept"


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 0)])
def test_both_roles_are_needed(prefill: int, decode: int) -> None:
    with pytest.raises(plan.NotPossible, match="at least one of each"):
        planned(prefill, decode)


def test_ranges_of_ports_that_meet_are_refused() -> None:
    port = free_ports()
    with pytest.raises(plan.NotPossible, match=f"port {port + 2} is meant for two engines"):
        plan.plan(3, 1, port, port + 2)


def test_engines_have_names_and_the_joining_one_is_apart() -> None:
    found = planned(2, 2)
    assert [node.name for node in found.engines] == ["P1", "P2", "D1", "D2"]
    assert (found.joins.name, found.joins.port) == ("P3", found.prefill[1].port + 1)
    assert found.name_of(found.decode[1].url) == "D2" and found.name_of(None) == "-"


def test_engines_take_gpus_in_turn_and_share_their_memory() -> None:
    found = plan.plan(1, 2, free_ports(), free_ports(), gpus=["0", "3"])
    assert [(node.name, node.gpu) for node in found.engines] == [("P1", "0"), ("D1", "3"), ("D2", "0")]
    assert found.joins.gpu == "3"
    assert [found.share_of_gpu(node) for node in found.engines] == [0.45, 0.45, 0.45]
    assert {node.gpu for node in planned(2, 2).engines} == {None}


def test_an_engine_on_a_gpu_is_told_which_and_computes_in_the_models_own_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    variables = "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES OMP_NUM_THREADS=$OMP_NUM_THREADS"
    (programs / "vllm").write_text(f'#!/bin/sh\necho "$@" {variables}\n')
    (programs / "vllm").chmod(0o755)
    monkeypatch.setattr(processes, "beside_python", lambda name: str(programs / name))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    said = {}
    for gpu, dtype in ((None, "float32"), ("3", "auto")):
        log = tmp_path / f"{gpu}.log"
        node = plan.Node("P1", "prefill", free_port(), gpu)
        engine = processes.ServedEngine(node, "m", {}, log, 2, 1000, GIB, ["--more"], dtype=dtype)
        engine._process.wait(60)
        engine.close()
        said[gpu] = log.read_text()
    assert "--dtype float32 --enforce-eager" in said[None]
    assert "CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=2" in said[None]
    assert "--dtype auto" in said["3"] and "--enforce-eager" not in said["3"] and "--more" in said["3"]
    assert "CUDA_VISIBLE_DEVICES=3 OMP_NUM_THREADS=\n" in said["3"]


def test_gpus_are_named_as_the_users_variable_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert run_pd.gpu_names(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-7")
    assert run_pd.gpu_names(2) == ["2", "GPU-7"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--device", "cuda"],
            "--device cuda: there is no GPU that kvlane can use; `kvlane doctor` says why",
        ),
        (["--flip", "--direct"], "leave out --direct"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_sentence(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    process = start(tmp_path, *flags)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (1, 2) and words in said and "Traceback" not in said


def test_too_little_memory_is_refused_with_what_fits() -> None:
    assert plan.check_memory(4, 0, GIB // 4, GIB, 24 * GIB) < 16 * GIB
    with pytest.raises(
        plan.NotPossible, match=r"8 engines take about .* GiB, and 12.0 GiB .* \(\d of them\)"
    ):
        plan.check_memory(8, 0, GIB, GIB, 12 * GIB)
    with pytest.raises(plan.NotPossible, match="smaller --model"):
        plan.check_memory(2, 30 * GIB, GIB, GIB, 24 * GIB)


@pytest.mark.parametrize(
    ("limit", "used", "available"),
    [("max", 0, 8 * GIB), (str(6 * GIB), 2 * GIB, 4 * GIB), (None, 0, 8 * GIB)],
)
def test_memory_is_that_of_the_container_where_it_has_less(
    limit: str | None, used: int, available: int, tmp_path: Path
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    if limit is not None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(limit)
        (tmp_path / "sys/fs/cgroup/memory.current").write_text(str(used))
    assert plan.available_memory(tmp_path) == available


def test_counters_are_read_out_of_vllms_page() -> None:
    labels = 'engine="0",model_name="demo"'
    page = "\n".join(
        [
            "# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.",
            f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} 12.0',
            f'vllm:prompt_tokens_by_source_total{{{labels},source="external_kv_transfer"}} 300.0',
            f'vllm:prompt_tokens_by_source_created{{{labels},source="local_compute"}} 1.7e+09',
            f"vllm:prompt_tokens_total{{{labels}}} 312.0",
        ]
    )
    assert read_prompt_tokens(page) == PromptTokens(computed=12, own_cache=0, connector=300)


def test_counters_that_count_something_else_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter([PromptTokens(1), PromptTokens(8, 0, 32)])
    grown = counted(lambda: next(pages), PromptTokens(1), 39)
    assert grown == PromptTokens(7, 0, 32)
    monkeypatch.setattr("kvlane.demo.pd.asking._COUNT_TIMEOUT_S", 0.0)
    with pytest.raises(AskFailed, match="a prompt of 39 tokens"):
        counted(lambda: PromptTokens(50), PromptTokens(1), 39)
    with pytest.raises(AskFailed, match="a prompt of 39 tokens"):
        counted(lambda: PromptTokens(1), PromptTokens(1), 39)


def an_answer(tokens: list[int]) -> Answer:
    return Answer(tokens, 100, 0.1)


def test_on_a_cpu_all_answers_are_equal_and_on_a_gpu_most_begin_alike() -> None:
    """On a GPU 20 of 40 answers were equal although all bytes were right: kernels round differently."""
    right, parts, wrong = an_answer([1, 2, 3]), an_answer([1, 2, 9]), an_answer([8, 2, 3])
    on_cpu, on_gpu = Comparing(is_exact=True), Comparing(is_exact=False)
    assert [on_cpu.are_alike(right, other) for other in (right, parts, wrong)] == [True, False, False]
    assert [on_gpu.are_alike(right, other) for other in (right, parts, wrong)] == [True, True, False]
    assert on_gpu.count([(right, parts), (right, wrong)]) == 1
    assert on_cpu.are_enough(40, 40) and not on_cpu.are_enough(39, 40)
    assert on_gpu.are_enough(21, 40) and not on_gpu.are_enough(20, 40)


def scenarios(**problems: list[str]) -> list[Scenario]:
    """As the demo makes them, with problems by the first letters of their names."""
    figures: dict[str, dict[str, Any]] = {
        "answers equal those of one engine": {"alike": 2, "compared": "equal", "prompts": 2},
        "the decode engine computes a block and a token at most": {
            "within": 2,
            "prompts": 2,
            "computed_tokens_each": [8, 33],
        },
        "control: wrong bytes give a wrong answer": {"changed_tokens": 7},
        "P1 killed -9 at work: all requests are answered": {"answered": 16, "requests": 16},
    }
    return [Scenario(name, found, problems.get(name[:3].strip(), [])) for name, found in figures.items()]


def found(*of: Scenario, planned: int = 4) -> dict[str, Any]:
    split = {"prefill": "P1", "decode": "D1", "why": "prefill, then decode", "attempt": 0, "id": "x"}
    requests = [{"request": "long prompt", **split}, *({"request": f"equal {at}", **split} for at in (1, 2))]
    return results.result(of, planned, requests) | {"prompt_tokens": 1000, "title": "on a CPU"}


def test_the_result_says_what_failed() -> None:
    good = found(*scenarios())
    flags = ("passed", "answers_equal", "control_failed_as_it_must", "decode_computes_little")
    assert [good[flag] for flag in flags] == [True] * 4
    for name, flag in (("ans", flags[1]), ("con", flags[2]), ("the", flags[3])):
        bad = found(*scenarios(**{name: ["it did not hold"]}))
        assert [each for each in flags if not bad[each]] == ["passed", flag]


def test_what_was_not_reached_did_not_pass() -> None:
    cut = found(*scenarios()[:1])
    assert (cut["passed"], cut["answers_equal"], cut["control_failed_as_it_must"]) == (False, True, False)


def test_tables_show_who_served_and_the_picture_what_was_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.publish(found(*scenarios(con=["it changed nothing"])), tmp_path)
    shown = capsys.readouterr().out
    assert "equal (2 times)" in shown and "2 of 2, most 33" in shown
    assert "FAILED" in shown and "it changed nothing" in shown
    assert (tmp_path / "demo-pd.json").is_file() and (tmp_path / "demo-pd.png").is_file()
    (computed,) = pictures.pairs(found(*scenarios())).panels
    assert [bar.text for bar in computed.bars] == ["1000 tokens", "20.5 tokens, most 33"]


def start(folder: Path, *flags: str, ends: bool = False) -> subprocess.Popen[str]:
    """The example, with a `vllm` on PATH that is a fake."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "vllm").write_text(FAKE_VLLM.format(python=sys.executable, ends=ends))
    (programs / "vllm").chmod(0o755)
    ports = ["--prefill-port", str(free_ports()), "--decode-port", str(free_ports())]
    command = [sys.executable, str(ROOT / "examples/run_pd.py"), "--model", str(folder), *ports, *flags]
    return subprocess.Popen(
        [*command, "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
        start_new_session=True,
    )


def descendants(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = set(), [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


@pytest.mark.parametrize(
    ("number", "flags"), [(signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGINT, ["--direct"])]
)
def test_ctrl_c_ends_every_process(number: signal.Signals, flags: list[str], tmp_path: Path) -> None:
    process = start(tmp_path, "--serve", *flags)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Ask it: curl http://127.0.0.1:"), process.communicate()[1]
        started = descendants(process.pid)
        assert len(started) >= (3 if flags else 4), "daemon, router, two engines"
        process.send_signal(number)
        # Twice, as impatient people do, and as `timeout` does: the second one must not end the ending.
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 128 + number, said
        assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []
    finally:
        process.kill()
        process.wait()


def test_an_engine_that_ends_ends_everything_with_a_sentence(tmp_path: Path) -> None:
    process = start(tmp_path, ends=True)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ended with status 3; see" in said and "Traceback" not in said
    here = str(tmp_path)
    left = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and here in _command_line(entry) and int(entry.name) != os.getpid()
    ]
    assert left == []


def _command_line(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
