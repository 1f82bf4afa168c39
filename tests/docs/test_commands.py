"""Every command of README.md and docs/ is run by some test; those that need neither vLLM nor root are run here."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import (
    CLUSTER,
    DIRECT,
    FLAGS,
    HERE,
    INDEX,
    PROXY,
    RECORD,
    REPLAY,
    RUN_AS_A_WHOLE,
    RUN_BY,
    TRANSFER,
)
from pages import PAGES, ROOT, SHELL, Command, all_commands, blocks, commands, name, prose, table
from ports import free_port
from processes import KVLANE, PATIENCE, Daemon, Engine, Index, clean_environment, run_kvlane, until
from recordings import recording

from kvlane import fabric
from kvlane.connector.settings_check import check

# Code within a sentence that is a command: what it names has to exist.
INLINE = re.compile(r"`((?:kvlane|make|python3?) [^`]+)`")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvlane-") as path:
        yield Path(path)


def asked() -> list[Command]:
    """The commands that are named one by one."""
    return [command for command in all_commands() if command.place.split(":")[0] not in RUN_AS_A_WHOLE]


def test_each_command_is_run_by_somebody() -> None:
    unknown = [f"{command.place}: {command.text}" for command in asked() if command.text not in RUN_BY]
    assert unknown == [], "say in tests/docs/commands.py which test runs it"


def test_no_entry_is_stale() -> None:
    assert set(RUN_BY) - {command.text for command in asked()} == set()
    shell = {name(page) for page in PAGES for block in blocks(page) if block.language in SHELL}
    assert set(RUN_AS_A_WHOLE) <= shell


@pytest.mark.parametrize("runner", sorted({*RUN_BY.values(), *RUN_AS_A_WHOLE.values()}))
def test_who_runs_it_exists(runner: str) -> None:
    if runner.startswith("make "):
        assert runner.removeprefix("make ") in targets()
        return
    path, _, test = runner.partition("::")
    assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.M)


def test_a_command_that_nobody_knows_is_noticed(tmp_path: Path) -> None:
    """The control: quotes, comments, continued lines and here-documents make one command each."""
    page = tmp_path / "page.md"
    text = "a 'b # c\nd' \\\n  e  # f\n\n# g\ncat > h <<END\ni 'j\nEND\nkvlane nonsense &\n"
    page.write_text(f"```sh\n{text}```\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pages.ROOT", tmp_path)
        (block,) = blocks(page)
        found = [command.text for command in commands(block)]
    assert found == ["a 'b # c d' e", "cat > h <<END", "kvlane nonsense &"]
    assert not set(found) & set(RUN_BY)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


# A log line may begin with the program's name.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "logs.md"], ids=name)
def test_commands_within_sentences_name_what_exists(page: Path) -> None:
    text = "\n".join(line for _, line in prose(page))
    for found in INLINE.finditer(text):
        program, *words = found[1].split()
        if program == "make":
            assert words[0] in targets(), found[0]
        elif program == "kvlane":
            check_kvlane(words, found[0])
        elif words[0] != "-m":
            assert (ROOT / words[0]).exists(), found[0]


def check_kvlane(words: list[str], shown: str) -> None:
    """The subcommand is there, and has these flags."""
    depth = 2 if words[0] == "bench" and re.fullmatch(r"[a-z-]*[a-z]", words[1]) else 1
    told = run_kvlane(*words[:depth], "--help")
    assert told.returncode == 0, f"{shown}: {told.stderr}"
    for flag in (word.split("=")[0] for word in words if word.startswith("--")):
        assert re.search(rf"{flag}\b", told.stdout), f"{shown}: there is no {flag}"


def words_of(text: str) -> tuple[dict[str, str], list[str]]:
    """Variables and words of a simple command, without redirections and `&`."""
    words = shlex.split(re.sub(r"\s*(>\s*\S+)?\s*(2>&1)?\s*&?$", "", text))
    variables: dict[str, str] = {}
    while re.match(r"[A-Z_]+=", words[0]):
        key, _, variables[key] = words.pop(0).partition("=")
    return variables, words


@pytest.mark.parametrize("text", [text for text, runner in RUN_BY.items() if runner == FLAGS])
def test_the_daemon_takes_what_pages_tell_it(text: str) -> None:
    """It looks at all of its flags before it takes anything, and here it finds an address that is none."""
    variables, words = words_of(text)
    assert words[:2] == ["kvlane", "serve"]
    told = run_kvlane(*words[1:], "--listen", "unix:", cwd=ROOT, env=clean_environment(**variables))
    assert told.returncode != 0 and "--listen" in told.stderr, told.stderr
    # The control: a flag that does not exist is noticed before the address.
    assert "--nonsense" in run_kvlane(*words[1:], "--nonsense", cwd=ROOT).stderr


def test_daemons_of_a_cluster_start_as_the_page_says(folder: Path, tmp_path: Path) -> None:
    """With addresses of this host for those of the page."""
    make_token, serve = (text for text, runner in RUN_BY.items() if runner == CLUSTER)
    subprocess.run(["sh", "-c", make_token], cwd=tmp_path, check=True)
    ports = [free_port(), free_port()]
    daemons = []
    try:
        for number, port in enumerate(ports):
            line = serve.replace("0.0.0.0:9555", f"127.0.0.1:{port}")
            for host, other in enumerate(ports, 1):
                line = line.replace(
                    f"--cluster-advertise 10.0.0.{host}:9555", f"--cluster-advertise 127.0.0.1:{port}"
                )
                line = line.replace(f"10.0.0.{host}:9555", f"127.0.0.1:{other}")
            _, words = words_of(line.replace("16gb", "16mib"))
            home = folder / str(number)
            home.mkdir()
            daemons.append(Daemon(home, *words[4:], cwd=tmp_path))
            daemons[-1].start()
        for daemon in daemons:
            until(
                "the other one is reached",
                lambda daemon=daemon: "  reached" in run_kvlane("status", "--addr", daemon.address).stdout,
            )
    finally:
        for daemon in daemons:
            daemon.kill()


def test_daemons_with_an_index_start_as_the_page_says(folder: Path, tmp_path: Path) -> None:
    """With addresses of this host for those of the page, and one replica."""
    run_index, serve = (text for text, runner in RUN_BY.items() if runner == INDEX)
    (tmp_path / "cluster.token").write_text("a secret\n")
    (tmp_path / "cluster.token").chmod(0o600)
    _, words = words_of(run_index)
    assert words[2::2] == ["--listen", "--advertise", "--token-file"]
    index = Index("--token-file", str(tmp_path / "cluster.token"))
    daemons: list[Daemon] = []
    try:
        index.start()
        for number in range(2):
            at = f"127.0.0.1:{free_port()}"
            line = serve.replace("0.0.0.0:9555", at).replace("10.0.0.3:9555", at).replace("16gb", "16mib")
            _, words = words_of(line.replace("10.0.0.1:9556,10.0.0.2:9556", index.address))
            home = folder / str(number)
            home.mkdir()
            daemons.append(Daemon(home, *words[4:], cwd=tmp_path))
            daemons[-1].start()
        until("the index follows both", lambda: len(index.blocks()) == 2)
        for daemon in daemons:
            until(
                "both the index and the other one are reached",
                lambda daemon=daemon: (
                    run_kvlane("status", "--addr", daemon.address).stdout.count("  reached") == 2
                ),
            )
    finally:
        index.kill()
        for daemon in daemons:
            daemon.kill()


def test_engines_start_as_on_the_start_page() -> None:
    """README's ways to start vLLM are run by the start page's test, but for the model and what only that page needs."""
    (shown,) = (
        words_of(command.text)
        for command in all_commands()
        if command.place.startswith("docs/start.md") and " vllm serve " in command.text
    )
    others = [text for text, runner in RUN_BY.items() if runner.endswith("as_on_the_start_page")]
    assert len(others) == 2
    for variables, words in map(words_of, others):
        assert variables.items() <= shown[0].items()
        assert [word for word in words if word != "MODEL" and word not in shown[1]] == []


def test_the_doctor_looks_at_an_engines_configuration(folder: Path) -> None:
    """Whether there is a vLLM beside it does not matter; that no daemon answers does."""
    (text,) = (text for text in RUN_BY if f"--engine-config {TRANSFER}" in text)
    words = shlex.split(text)[1:]
    address = f"unix:{folder}/kvlane.sock"
    told = run_kvlane(*words, env=clean_environment(KVLANE_ADDR=address))
    assert "engine config" in told.stdout, told.stderr
    # The control: a misspelt key is answered with the right one.
    config = {**json.loads(words[-1]), "kv_connector_extra_config": {"kvlane.adress": address}}
    wrong = run_kvlane(*words[:-1], json.dumps(config), env=clean_environment(KVLANE_ADDR=address))
    assert wrong.returncode != 0 and "'kvlane.address'" in wrong.stdout


def test_the_doctor_reads_a_p2p_nccl_configuration(folder: Path) -> None:
    (text,) = (text for text in RUN_BY if "--engine-config" in text and "P2pNcclConnector" in text)
    words = shlex.split(text)[1:]
    told = run_kvlane(*words, env=clean_environment(KVLANE_ADDR=f"unix:{folder}/kvlane.sock"))
    expected = "direct hand-offs, listening at 127.0.0.1:21001; pings to 127.0.0.1:30001"
    assert expected in " ".join(told.stdout.split()), told.stderr


@pytest.mark.parametrize("text", [text for text, runner in RUN_BY.items() if runner == PROXY])
def test_the_router_starts_in_a_proxys_place_as_the_page_says(text: str, folder: Path) -> None:
    keys = folder / "keys"
    keys.write_text("a key of some length\n")
    keys.chmod(0o600)
    words = (
        re.sub(r"10\.0\.1\.1:\d+|127\.0\.0\.1:\d+", "127.0.0.1:0", text)
        .replace(" keys ", f" {keys} ")
        .split()
    )
    command = [str(KVLANE), *words[1:], "--admin", "127.0.0.1:0", "--socket", f"{folder}/route.sock"]
    router = subprocess.Popen(command, env=clean_environment(), stderr=subprocess.PIPE, text=True)

    def answers() -> bool:
        assert router.poll() is None, router.communicate()[1]
        return run_kvlane("route", "list", "--socket", f"{folder}/route.sock").returncode == 0

    try:
        until("the router answers", answers)
    finally:
        router.kill()
        router.communicate()


def test_health_and_metrics_are_asked_for(folder: Path) -> None:
    daemon = Daemon(folder)
    try:
        daemon.start()
        said = {}
        for text, runner in RUN_BY.items():
            if runner == HERE + "test_health_and_metrics_are_asked_for":
                asking = text.replace("9091", str(daemon.port)).split()
                said[text] = subprocess.run(asking, capture_output=True, text=True, check=True).stdout
        health, metrics = said.values()
        assert json.loads(health)["status"] == "ok"
        assert "\nkvlane_pool_bytes " in metrics
    finally:
        daemon.kill()


@pytest.mark.parametrize("text", [text for text, runner in RUN_BY.items() if runner == REPLAY])
def test_a_trace_is_replayed(text: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    requests = [{"timestamp": 1000 * turn, "hash_ids": list(range(turn % 3 + 2))} for turn in range(20)]
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    words = [word.replace("TRACE", str(trace)) for word in shlex.split(text)]
    told = run_kvlane(*words[1:], cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "lru" in told.stdout


def test_a_daemon_is_recorded_and_replayed_as_the_pages_say(folder: Path, tmp_path: Path) -> None:
    daemon = Daemon(folder)
    engine = None
    try:
        daemon.start()
        engine = Engine(daemon.address, "engine")
        texts = [text for text, runner in RUN_BY.items() if runner == RECORD]
        for text in texts:
            words = shlex.split(text.replace("TRACE", "TRACE.jsonl"))[1:]
            if words[0] == "replay":
                told = run_kvlane(*words, cwd=tmp_path)
                assert told.returncode == 0, told.stderr
                assert "lru" in told.stdout and "hits" in told.stdout
                continue
            with recording(daemon, tmp_path / words[1], *words[2:]) as made:
                engine.call("serve", requests=[(f"chat-{turn % 3}", 2 + turn, 1) for turn in range(20)])
                assert made.end().header["requests"] == 20
    finally:
        if engine is not None:
            engine.kill()
        daemon.kill()


@pytest.mark.parametrize("model", [row[0] for row in table("docs/sizing.md", "| model | layers |")])
def test_sizes_are_those_of_the_page(model: str) -> None:
    """`kvlane size` says of a model's config.json what the table says."""
    (text,) = (text for text in RUN_BY if text.startswith("kvlane size"))
    config = ROOT / f"crates/cli/tests/models/{model.lower()}.json"
    words = [word.replace("CONFIG.json", str(config)) for word in text.split()]
    told = run_kvlane(*words[1:], "--json")
    assert told.returncode == 0, told.stderr
    (shown,) = (row[4] for row in table("docs/sizing.md", "| model | layers |") if row[0] == model)
    assert f"{json.loads(told.stdout)['bytes_per_token'] / 1024:.3g} KiB" == shown


def test_benchmarks_know_their_flags() -> None:
    """What they do is tested in tests/bench, with other numbers."""
    for text, runner in RUN_BY.items():
        if runner == HERE + "test_benchmarks_know_their_flags":
            check_kvlane(text.split()[1:], text)


def test_the_unit_starts_a_daemon_as_systemd_would(folder: Path) -> None:
    """Its command, with the settings that come with it, in a folder of systemd's; and both messages that systemd waits
    for. The control: nothing is said before engines can connect."""
    unit = (ROOT / "examples/systemd/kvlane.service").read_text()
    settings = folder / "kvlane.toml"
    text = (ROOT / "examples/systemd/kvlane.toml").read_text()
    for there, here in (
        ("/run/kvlane", str(folder)),
        ("16gb", "64mib"),
        ("127.0.0.1:9091", f"127.0.0.1:{free_port()}"),
    ):
        assert there in text
        text = text.replace(there, here)
    settings.write_text(text)
    (started,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    words = [
        word.replace("/opt/kvlane/bin/kvlane", str(KVLANE)).replace("/etc/kvlane.toml", str(settings))
        for word in started.split()
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(folder / "notify"))
        systemd.settimeout(PATIENCE)
        environment = clean_environment(NOTIFY_SOCKET=str(folder / "notify"))
        daemon = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
        try:
            assert "READY=1" in systemd.recv(4096).decode().splitlines()
            told = run_kvlane("status", "--addr", f"unix:{folder}/kvlane.sock")
            assert told.returncode == 0, told.stderr
            daemon.send_signal(signal.SIGTERM)
            assert "STOPPING=1" in systemd.recv(4096).decode().splitlines()
            assert daemon.wait(PATIENCE) == 0
        finally:
            daemon.kill()
            daemon.wait()


def test_the_unit_starts_and_reloads_a_router_as_systemd_would(folder: Path) -> None:
    """Runs the unit's commands, with its example settings and the messages that systemd waits for."""
    unit = dict(
        re.findall(r"^(\w+)=(.*)$", (ROOT / "examples/systemd/kvlane-route.service").read_text(), re.M)
    )
    settings = folder / "kvlane-route.toml"
    text = (ROOT / "examples/systemd/kvlane-route.toml").read_text()
    times = dict(re.findall(r"^(drain|drain-delay) = (\d+)$", text, re.M))
    assert sum(map(int, times.values())) < int(unit["TimeoutStopSec"])
    for there, here in (
        ("/run/kvlane-route", str(folder)),
        ("127.0.0.1:8000", "127.0.0.1:0"),
        ("127.0.0.1:9092", "127.0.0.1:0"),
        ("drain-delay = 5", "drain-delay = 0"),
    ):
        assert there in text
        text = text.replace(there, here)
    settings.write_text(text)
    words = [
        word.replace("/opt/kvlane/bin/kvlane", str(KVLANE)).replace("/etc/kvlane-route.toml", str(settings))
        for word in unit["ExecStart"].split()
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(folder / "notify"))
        systemd.settimeout(PATIENCE)
        environment = clean_environment(NOTIFY_SOCKET=str(folder / "notify"))
        router = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            assert "READY=1" in systemd.recv(4096).decode().splitlines()
            told = run_kvlane("route", "list", "--socket", f"{folder}/route.sock")
            assert told.returncode == 0 and "http://127.0.0.1:8100" in told.stdout, told.stderr
            reload = shlex.split(unit["ExecReload"].replace("$MAINPID", str(router.pid)))
            subprocess.run(reload, check=True)
            assert router.stderr is not None
            assert any("configuration read again" in line for line in router.stderr)
            router.send_signal(signal.SIGTERM)
            assert "STOPPING=1" in systemd.recv(4096).decode().splitlines()
            assert router.wait(PATIENCE) == 0
        finally:
            router.kill()
            router.wait()


def test_certificates_are_made_and_fit_each_other(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(ROOT / "docs/fabric.md") if "openssl" in block.text)
    assert block.language == "sh"
    subprocess.run(["bash", "-eu", "-c", block.text], cwd=tmp_path, capture_output=True, check=True)
    tls = fabric.Tls(*(tmp_path / f"{part}.pem" for part in ("certificate", "key", "authority")))
    memory = bytearray(b"from here to there" + bytes(18))
    with fabric.Engine(token="t", tls=tls) as here, fabric.Engine(token="t", tls=tls) as there:
        target = bytearray(18)
        region, remote = here.register(memory), there.register(target)
        peer = here.connect(there.describe())
        peer.write(region, remote.number, [(0, 0, 18)], timeout=PATIENCE).wait()
        assert target == b"from here to there"


def test_the_fabrics_example_moves_bytes() -> None:
    (block,) = (block for block in blocks(ROOT / "docs/fabric.md") if block.language == "python")
    code = f"{block.text}assert memory == b'x' * 4096\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_engines_for_direct_hand_offs_are_configured_as_the_page_says() -> None:
    texts = [text for text, runner in RUN_BY.items() if runner == DIRECT]
    assert len(texts) == 2
    for text in texts:
        config = json.loads(shlex.split(text)[-1])
        findings, settings = check(config)
        assert settings is not None and settings.direct == "on"
        assert [finding for finding in findings if finding["verdict"] == "problem"] == []
    # The control.
    config["kv_connector_extra_config"]["kvlane.direct.lissen"] = "127.0.0.1:7100"
    findings, _ = check(config)
    assert any("kvlane.direct.listen" in str(finding) for finding in findings)
