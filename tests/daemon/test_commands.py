"""What a person does with the daemon: serve, status, drop, stop; its pages over HTTP; where its settings come from."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from patterns import NAMESPACE
from ports import free_port
from processes import Daemon, Engine, clean_environment, run_kvlane, until
from wire import (
    DROP_NAMESPACES,
    GET_STATUS,
    HELLO,
    LOOKUP,
    MAP_POOL,
    NOT_ALLOWED,
    SETTLE,
    STATUS,
    WELCOME,
    Wire,
    hello,
)

MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]


def test_serve_says_where_and_answers_over_http(daemon: Daemon, make_engine: MakeEngine) -> None:
    ready = daemon.ready_line()
    assert daemon.address in ready
    assert str(daemon.port) in ready
    code, body = daemon.http("/health")
    assert code == 200
    assert json.loads(body)["status"] == "ok"
    engine = make_engine(daemon, "http")
    assert engine.call("save", prompt="p", count=5)["blocks"] == 5
    daemon.settle()
    assert (
        f'kvlane_namespace_blocks{{namespace="{NAMESPACE.hex()}",name="pattern"}} 5'
        in daemon.http("/metrics")[1]
    )


@pytest.mark.fake_gpus
def test_every_metric_of_the_reference_appears(
    make_daemon: MakeDaemon, make_engine: MakeEngine, folder: Path
) -> None:
    assert run_kvlane("reference", str(folder / "reference")).returncode == 0
    of_the_daemon = (folder / "reference/metrics.md").read_text().split("## The router")[0]
    names = set(re.findall(r"\b(?:kvlane|process)_\w+", of_the_daemon))
    assert len(names) > 20
    # Some are of GPUs, some of an SSD, of other daemons or of shadow caches.
    flags = ("--scrub-rate", "100mb", "--ssd", f"{folder}/blocks:64mib", "--policy", "auto")
    flags += ("--peers", "127.0.0.1:1", "--cluster-listen", "127.0.0.1:0")
    flags += ("--otlp-endpoint", "http://127.0.0.1:1")
    daemon = make_daemon(*flags, environment={"KVLANE_GPU_DRIVER": "fake"})
    engine = make_engine(daemon, "traffic")
    engine.call("save", prompt="p", count=9)
    engine.call("save", prompt="p", count=9)
    daemon.settle()
    assert engine.call("check", prompt="p", count=9) == {"blocks": 9, "wrong": [], "ok": True, "detail": ""}
    engine.call("check", prompt="other", count=3)
    # Before so many blocks were asked for, some of them again, nothing is learnt of them.
    for turn in range(10):
        engine.call("lookup", prompt=f"asked for {turn % 5}", count=500)
    handed_over = engine.call("hand_over", count=2, wait_ms=1)
    engine.call("lookup", prompt="new", count=2, handoff=handed_over)
    with Wire(daemon.path) as wire:
        wire.ask(HELLO, hello())
        wire.refused(LOOKUP)
        wire.socket.sendall(b"\xff" * 8)
        wire.wait_closed()

    def page() -> str:
        return daemon.http("/metrics")[1]

    def missing() -> list[str]:
        there = page()
        return [
            name for name in sorted(names) if not re.search(rf"^{name}(_bucket|_count)?[ {{]", there, re.M)
        ]

    until("every metric", lambda: not missing())
    text = page()
    described = set(re.findall(r"^# HELP (\w+) ", text, re.M))
    assert names <= described
    labels = f'namespace="{NAMESPACE.hex()}",name="pattern"'
    for line in (
        "kvlane_blocks 9",
        "kvlane_sealed_blocks_total 9",
        "kvlane_save_present_blocks_total 9",
        f"kvlane_hit_blocks_total{{{labels}}} 9",
        f"kvlane_missed_blocks_total{{{labels}}} 5005",
        'kvlane_sessions{role="worker"} 1',
        "kvlane_bad_frames_total 1",
        'kvlane_requests_refused_total{call="Lookup"} 1',
    ):
        assert line in text.splitlines(), f"{line} in\n{text}"


def test_the_metrics_of_a_namespace_are_the_sum_over_its_layouts(
    daemon: Daemon, make_engine: MakeEngine
) -> None:
    """The last layout's figures used to stand for all."""
    make_engine(daemon, "one").call("save", prompt="p", count=5)
    make_engine(daemon, "two", layout="05" * 16).call("save", prompt="p", count=2)
    daemon.settle()
    labels = f'namespace="{NAMESPACE.hex()}",name="pattern"'
    assert f"kvlane_namespace_blocks{{{labels}}} 7" in daemon.http("/metrics")[1].splitlines()


def test_status_for_people_and_for_programs(daemon: Daemon, make_engine: MakeEngine) -> None:
    engine = make_engine(daemon, "engine-7", save_method="mapped")
    engine.call("save", prompt="p", count=3)
    daemon.settle()
    told = run_kvlane("status", "--addr", daemon.address)
    assert told.returncode == 0
    for part in (
        "engine-7",
        "scheduler",
        "worker",
        "mapped",
        NAMESPACE.hex(),
        "pattern",
        "kvlane tests",
        str(engine.pid),
    ):
        assert part in told.stdout, told.stdout
    status = json.loads(run_kvlane("status", "--json", "--addr", daemon.address).stdout)
    assert (status["blocks"], status["leased_blocks"], status["claimed_blocks"]) == (3, 0, 0)
    (worker,) = [session for session in status["sessions"] if session["role"] == "worker"]
    assert (worker["save_method"], worker["pid"]) == ("mapped", engine.pid)
    assert "asked for" in worker["save_method_reason"]
    assert status["used_bytes"] == status["namespaces"][0]["bytes"] > 0


def test_drop_names_what_it_dropped_and_refuses_what_is_not_there(
    daemon: Daemon, make_engine: MakeEngine
) -> None:
    engine = make_engine(daemon, "a")
    engine.call("save", prompt="p", count=3)
    daemon.settle()
    wrong = run_kvlane("drop", "ffff", "--addr", daemon.address)
    assert wrong.returncode == 1
    assert "'ffff'" in wrong.stderr
    # As of a variable that is not set: every name begins with it.
    empty = run_kvlane("drop", "", "--addr", daemon.address)
    assert (empty.returncode, empty.stderr) == (1, "kvlane: '' names no namespace: see `kvlane status`\n")
    assert engine.call("check", prompt="p", count=3)["blocks"] == 3
    right = run_kvlane("drop", NAMESPACE.hex()[:6], "--addr", daemon.address)
    assert right.returncode == 0, right.stderr
    assert "3 blocks" in right.stdout
    assert NAMESPACE.hex() in right.stdout
    assert engine.call("check", prompt="p", count=3)["blocks"] == 0


def test_tools_without_a_daemon_say_what_to_do(folder: Path) -> None:
    for command in (["status"], ["drop", "00"]):
        failed = run_kvlane(*command, "--addr", f"unix:{folder}/nobody.sock")
        assert failed.returncode == 1
        assert f"{folder}/nobody.sock" in failed.stderr
        assert "kvlane serve" in failed.stderr
        assert len(failed.stderr.strip().splitlines()) == 1


def test_a_file_that_is_no_socket_is_called_so(folder: Path) -> None:
    file = folder / "file"
    file.write_text("")
    failed = run_kvlane("status", "--addr", f"{file}")
    assert failed.returncode == 1
    assert f"no kvlane daemon answers at unix:{file} (it is no socket)" in failed.stderr


def test_status_over_tcp_and_nothing_else(make_daemon: MakeDaemon) -> None:
    port = free_port()
    daemon = make_daemon("--listen", f"127.0.0.1:{port}")
    assert daemon.path.exists(), "the socket and the port are both served"
    assert run_kvlane("status", "--addr", f"127.0.0.1:{port}").returncode == 0
    with Wire(("127.0.0.1", port)) as wire:
        wire.ask(HELLO, hello())
        assert wire.ask(GET_STATUS)[0] == STATUS
        for body in (DROP_NAMESPACES, MAP_POOL, LOOKUP, SETTLE):
            reason, sentence = wire.refused(body)
            assert reason == NOT_ALLOWED
            assert "TCP" in sentence


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_cleanly(daemon: Daemon, make_engine: MakeEngine, number: signal.Signals) -> None:
    make_engine(daemon, "a").call("save", prompt="p", count=3)
    daemon.signal(number)
    assert daemon.process is not None
    assert daemon.process.wait(30) == 0
    assert not daemon.path.exists()
    with pytest.raises(OSError, match="refused"):
        daemon.http("/health")


def test_saves_under_way_are_carried_out_before_it_ends(daemon: Daemon, make_engine: MakeEngine) -> None:
    """Its answer used to be lost when the daemon stopped between the copy and the answer."""
    for turn in range(5):
        engine = make_engine(daemon, f"a{turn}", blocks=2048, piece_bytes=4096)
        engine.call("fill", prompt="p", count=2048)
        engine.send("save", prompt="p", count=2048, fill=False)
        until("a save under way", lambda: daemon.status()["blocks"] + daemon.status()["claimed_blocks"] > 0)
        assert daemon.stop() == 0
        end = engine.answer()
        assert end["ok"], end
        assert end["blocks"] == 2048
        engine.kill()
        daemon.start()


def test_it_ends_although_somebody_removed_its_socket(daemon: Daemon) -> None:
    """The thread that accepts was woken by a connection to the path, and waited for ever without it."""
    daemon.path.unlink()
    assert daemon.stop() == 0


def test_it_leaves_the_socket_of_its_successor_alone(daemon: Daemon, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as successor:
        successor.bind(str(folder / "successor.sock"))
        successor.listen()
        os.replace(folder / "successor.sock", daemon.path)
        assert daemon.stop() == 0
        assert daemon.path.exists()


def test_settings_come_from_flags_then_environment_then_file(folder: Path, make_daemon: MakeDaemon) -> None:
    file = folder / "kvlane.toml"
    file.write_text('pool-size = "20mib"\nmax-sessions = 3\nlog = "warn"\nscrub-rate = "1mb"\n')
    daemon = make_daemon(environment={"KVLANE_CONFIG": str(file), "KVLANE_MAX_SESSIONS": "2"}, pool="24mib")
    assert daemon.status()["pool_bytes"] == 24 << 20, "the flag wins over the file"
    idle = 'kvlane_sessions{role="tool"} 0'
    until("the status call's own session to go", lambda: idle in daemon.http("/metrics")[1])
    with Wire(daemon.path) as one, Wire(daemon.path) as two, Wire(daemon.path) as three:
        assert one.ask(HELLO, hello(nonce=b"1" * 16))[0] == WELCOME
        assert two.ask(HELLO, hello(nonce=b"2" * 16))[0] == WELCOME
        _, sentence = three.refused(HELLO, hello(nonce=b"3" * 16))
        assert "2 sessions" in sentence, "the environment wins over the file"
        assert "--max-sessions" in sentence
    assert " INFO" not in daemon.log.text(), "and the file over the defaults"


def test_the_file_alone_is_enough(folder: Path, cleanup: ExitStack) -> None:
    """No flag but --config: all keys are understood."""
    daemon = Daemon(folder)
    (folder / "all.toml").write_text(
        f'pool-size = "20mib"\nlisten = ["{daemon.address}"]\nhttp = "off"\nhugepages = "off"\nnuma = "off"\n'
        'scrub-rate = 0\nmax-sessions = 9\ndrain-seconds = 1\nlog = "info"\n'
    )
    cleanup.callback(daemon.kill)
    daemon.start_with("--config", str(folder / "all.toml"))
    assert "http" not in daemon.ready_line()
    assert daemon.status()["pool_bytes"] == 20 << 20
    assert daemon.stop() == 0


def test_http_can_be_off(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(http="off")
    assert "http" not in daemon.ready_line()
    with pytest.raises(OSError, match="refused"):
        daemon.http("/health")
    assert daemon.status()["blocks"] == 0


def _doctor(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """At a socket in `folder`, with a pool that fits anywhere."""
    address = f"unix:{folder}/kvlane.sock"
    if "--pool-size" not in flags:
        flags = ("--pool-size", "1mib", *flags)
    return run_kvlane("doctor", "--addr", address, *flags, env=clean_environment(**environment))


def _findings(told: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    return {finding["subject"]: finding for finding in json.loads(told.stdout)["findings"]}


def test_doctor_without_a_daemon_says_what_is_missing_and_that_kvlane_works(folder: Path) -> None:
    told = _doctor(folder, KVLANE_GPU_DRIVER="off")
    assert told.returncode == 0, told.stdout
    assert re.search(rf"^note +daemon +none answers at unix:{folder}/kvlane.sock$", told.stdout, re.M)
    assert re.search(r"^ +do +start one with `kvlane serve`", told.stdout, re.M)
    assert re.search(r"^note +gpu driver +KVLANE_GPU_DRIVER is off$", told.stdout, re.M)
    assert told.stdout.splitlines()[-1].startswith("kvlane works here: no problem, ")
    assert "\x1b" not in told.stdout, "no colours but on a terminal"
    assert not (folder / "kvlane.sock").exists(), "it changes nothing"
    quiet, verbose = len(told.stdout), len(_doctor(folder, "--verbose", KVLANE_GPU_DRIVER="off").stdout)
    assert quiet < verbose


@pytest.mark.fake_gpus
def test_doctor_with_a_daemon_for_programs(daemon: Daemon, folder: Path) -> None:
    told = _doctor(folder, "--json", KVLANE_GPU_DRIVER="fake", PYTHONHASHSEED="7")
    assert told.returncode == 0, told.stdout
    report = json.loads(told.stdout)
    assert report["problems"] == 0
    assert report["notes"] == sum(finding["verdict"] == "note" for finding in report["findings"])
    for finding in report["findings"]:
        assert set(finding) == {"subject", "verdict", "found", "means", "advice"}
        assert finding["verdict"] == "ok" or finding["advice"], finding
    findings = _findings(told)
    assert (findings["daemon"]["verdict"], findings["daemon"]["found"]) == (
        "ok",
        f"kvlane {report['version']} answers at {daemon.address}",
    )
    assert "fake GPU" in findings["gpu 0"]["found"]
    assert "'7'" in findings["hash seed"]["found"].replace('"', "'")
    # The interpreter beside the binary, or the one that runs this test.
    assert f"kvlane {report['version']} in Python" in findings["vllm"]["found"], findings["vllm"]
    until("its session to go", lambda: daemon.status()["sessions"][:-1] == [])


def test_doctor_fails_where_the_daemon_could_not_start(folder: Path) -> None:
    (folder / "kvlane.sock").write_text("no socket")
    told = _doctor(folder, "--json", KVLANE_GPU_DRIVER="off")
    assert told.returncode == 1
    assert _findings(told)["daemon"]["verdict"] == "problem"
    (folder / "kvlane.sock").unlink()
    told = _doctor(folder, "--pool-size", "1000tb", KVLANE_GPU_DRIVER="off")
    assert told.returncode == 1
    assert re.search(r"^problem +memory ", told.stdout, re.M)
    assert re.search(r"^ +do +choose a smaller --pool-size", told.stdout, re.M)
    assert "kvlane does not work here as it is: 1 problem" in told.stdout


def test_doctor_does_not_wait_for_a_daemon_that_is_stopped(daemon: Daemon, folder: Path) -> None:
    daemon.signal(signal.SIGSTOP)
    told = _doctor(folder, "--json", KVLANE_GPU_DRIVER="off")
    daemon.signal(signal.SIGCONT)
    assert told.returncode == 1
    assert "did not answer" in _findings(told)["daemon"]["found"]


def _engine_config(folder: Path, config: object, **environment: str) -> dict[str, list[dict[str, str]]]:
    """What the doctor says of an engine's configuration and of its daemon."""
    text = config if isinstance(config, str) else json.dumps(config)
    # The interpreter of these tests: that beside the program, or the first on the path.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    told = _doctor(
        folder, "--json", "--engine-config", text, KVLANE_GPU_DRIVER="off", PATH=path, **environment
    )
    found: dict[str, list[dict[str, str]]] = {"engine config": [], "engine's daemon": []}
    for finding in json.loads(told.stdout)["findings"]:
        if finding["subject"] in found:
            found[finding["subject"]].append(finding)
    worst = any(finding["verdict"] == "problem" for each in found.values() for finding in each)
    assert told.returncode == int(worst), told.stdout
    return found


RIGHT = {
    "kv_connector": "KVLaneConnector",
    "kv_connector_module_path": "kvlane.connector",
    "kv_role": "kv_both",
}


def test_doctor_looks_at_an_engines_configuration_and_for_its_daemon(daemon: Daemon, folder: Path) -> None:
    extra = {"kvlane.address": daemon.address, "kvlane.save": True}
    right = _engine_config(folder, {**RIGHT, "kv_connector_extra_config": extra})
    assert [finding["verdict"] for finding in right["engine config"]] == ["ok"]
    (found,) = right["engine's daemon"]
    assert found["verdict"] == "ok" and daemon.address in found["found"]
    (folder / "engine.json").write_text(json.dumps(RIGHT))
    from_file = _engine_config(folder, str(folder / "engine.json"), KVLANE_ADDR=daemon.address)
    assert [finding["verdict"] for each in from_file.values() for finding in each] == ["ok", "ok"]
    # As one of several connectors.
    several = {"connectors": [{"kv_connector": "Other"}, {**RIGHT, "kv_connector_extra_config": extra}]}
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": several}
    assert [finding["verdict"] for finding in _engine_config(folder, multi)["engine config"]] == ["ok"]


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ("{'kv_connector': 1}", "it is no JSON (line 1, column 2"),
        ("[]", "has to be an object"),
        ("/nonexistent.json", "'/nonexistent.json' is neither JSON nor a file"),
        ({**RIGHT, "kv_connector": "KvLaneConnector"}, "kv_connector is 'KvLaneConnector'"),
        ({"kv_role": "kv_both"}, "kv_connector is missing"),
        ({**RIGHT, "kv_connector_module_path": "kvlane"}, "kv_connector_module_path is 'kvlane'"),
        ({**RIGHT, "kv_role": "both"}, "kv_role is 'both'"),
        ({"kv_connector": "KVLaneConnector"}, "kv_role is missing"),
        ({**RIGHT, "kv_conector_extra_config": {}}, "the key 'kv_conector_extra_config' is unknown"),
        ({**RIGHT, "kv_connector_extra_config": "x"}, "has to be an object"),
        ({**RIGHT, "kv_connector_extra_config": {"kvlane.adress": "x"}}, "did you mean 'kvlane.address'?"),
        ({**RIGHT, "kv_connector_extra_config": {"kvlane.save": "yes"}}, "kvlane.save must be true or false"),
    ],
)
def test_doctor_names_what_is_wrong_in_an_engines_configuration(
    folder: Path, config: object, part: str
) -> None:
    """A misspelt key of vLLM's own, or another name of the connector, was found out with the engine's start."""
    found = _engine_config(folder, config)["engine config"]
    assert any(finding["verdict"] == "problem" and part in finding["found"] for finding in found), found
    assert all(finding["advice"] for finding in found)


def test_doctor_says_where_an_engine_will_find_no_daemon(folder: Path) -> None:
    (found,) = _engine_config(folder, RIGHT, KVLANE_ADDR=f"unix:{folder}/nobody.sock")["engine's daemon"]
    assert (found["verdict"], found["found"]) == ("problem", f"none answers at unix:{folder}/nobody.sock")
    (found,) = _engine_config(folder, RIGHT, KVLANE_ADDR="127.0.0.1:1")["engine's daemon"]
    assert found["verdict"] == "problem" and "TCP" in found["found"]


def test_size_says_what_a_pool_has_to_hold(folder: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for path in (folder, folder / "config.json"):
        told = run_kvlane("size", str(path), "--tokens", "1_000_000")
        assert told.returncode == 0, told.stderr
        assert "131072 bytes: 32 layers x 2" in told.stdout
        assert "kvlane serve --pool-size 131072000000\n" in told.stdout
        assert max(map(len, told.stdout.splitlines())) <= 120
    counted = json.loads(run_kvlane("size", str(folder), "--tokens", "32", "--json").stdout)
    assert (counted["bytes_per_token"], counted["pool_bytes"]) == (131_072, 2 * 2_097_152)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": None}))
    refused = run_kvlane("size", str(folder), "--tokens", "1000")
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"kvlane: {folder}/config.json: it has no 'num_hidden_layers'")
    missing = run_kvlane("size", str(folder / "none"), "--tokens", "1000")
    assert missing.returncode == 1
    assert missing.stderr.startswith(
        f"kvlane: {folder}/none cannot be read (No such file or directory): name "
    )


def test_doctor_refuses_an_address_that_is_none() -> None:
    sentence = "'nowhere' is no address: write unix:PATH, PATH or HOST:PORT\n"
    told = run_kvlane("doctor", "--addr", "nowhere")
    assert (told.returncode, told.stderr) == (1, f"kvlane: --addr {sentence}")
    told = run_kvlane("status", env=clean_environment(KVLANE_ADDR="nowhere"))
    assert (told.returncode, told.stderr) == (1, f"kvlane: KVLANE_ADDR {sentence}"), "what is to be changed"
