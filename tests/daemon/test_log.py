"""The daemon's log: for people, for programs that collect it, and what a service manager hears beside it."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import KVLANE, PATIENCE, Daemon, ServiceManager, clean_environment, run_kvlane

MakeDaemon = Callable[..., Daemon]


def test_the_ready_line_is_a_line_of_the_log(daemon: Daemon) -> None:
    """It was printed beside the log: without time or level, and also where only warnings were wanted."""
    assert re.match(
        r"\d{4}-\d\d-\d\dT\S+Z +INFO kvlane::serve: kvlane \S+ serves unix:\S+; pool of .* ready after",
        daemon.ready_line(),
    )
    assert daemon.stop() == 0
    assert all(re.match(r"\d{4}-\d\d-\d\dT\S+Z +[A-Z]+ \w+", line) for line in daemon.log.rest().splitlines())


def test_a_daemon_that_is_told_to_log_nothing_logs_nothing(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("--log", "off")
    assert daemon.stop() == 0
    assert daemon.log.rest() == ""


def test_a_log_for_programs_is_json_and_nothing_else(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("--log-format", "json", "--rails", "9", environment={"KVLANE_GPU_DRIVER": "off"})
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log.rest().splitlines()]
    assert {"timestamp", "level", "target", "fields"} <= set(lines[0])
    told = [(line["level"], line["fields"]["message"]) for line in lines]
    assert any(level == "INFO" and "ready after" in message for level, message in told), told
    assert any(
        level == "WARN" and message.startswith("--rails 9 has no effect") for level, message in told
    ), told


def test_an_error_in_a_log_for_programs_is_json_too(folder: Path) -> None:
    flags = ("--pool-size", "900tb", "--listen", f"unix:{folder}/k.sock", "--http", "off")
    ended = run_kvlane("serve", *flags, env=clean_environment(KVLANE_LOG_FORMAT="json"))
    assert ended.returncode == 1
    last = json.loads(ended.stderr.splitlines()[-1])
    assert last["level"] == "ERROR" and last["fields"]["message"].startswith("--pool-size '900tb': ")
    # Where not even errors are wanted in the log, it is told all the same.
    ended = run_kvlane("serve", *flags, "--log-format", "json", "--log", "off")
    assert ended.stderr.startswith("kvlane: --pool-size '900tb': ") and len(ended.stderr.splitlines()) == 1


def _on_a_terminal(folder: Path, **environment: str) -> str:
    """The log of a daemon whose stderr is a terminal."""
    mine, its = pty.openpty()
    with ServiceManager() as manager:
        process = subprocess.Popen(
            [KVLANE, "serve", "--pool-size", "1mib", "--listen", f"unix:{folder}/k.sock", "--http", "off"],
            stderr=its,
            env=clean_environment(**{"TERM": "xterm", **environment}, NOTIFY_SOCKET=manager.address),
        )
        os.close(its)
        try:
            assert manager.is_ready(process)
            process.terminate()
            assert process.wait(PATIENCE) == 0
            assert manager.heard() == ["STOPPING=1"]
        finally:
            process.kill()
            process.wait(PATIENCE)
    said = b""
    while True:
        try:
            part = os.read(mine, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    os.close(mine)
    return said.decode()


def test_colours_are_for_terminals_and_for_those_who_want_them(daemon: Daemon, folder: Path) -> None:
    """The log had colour codes in files and in the journal."""
    daemon.ready_line()
    assert "\x1b" not in daemon.log.text()
    folder = folder / "terminal"
    assert "\x1b[32m INFO" in _on_a_terminal(folder, NO_COLOR="")
    assert "\x1b[32m" not in _on_a_terminal(folder, NO_COLOR="1")


def test_a_service_manager_that_is_not_there_keeps_nobody_from_serving(
    make_daemon: MakeDaemon, folder: Path
) -> None:
    process = subprocess.Popen(
        [KVLANE, "serve", "--pool-size", "1mib", "--listen", f"unix:{folder}/k.sock", "--http", "off"],
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(NOTIFY_SOCKET=str(folder / "nobody")),
    )
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "NOTIFY_SOCKET" in line)
        assert " WARN " in line
        assert run_kvlane("status", "--addr", f"unix:{folder}/k.sock").returncode == 0
        process.terminate()
        process.stderr.read()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait(PATIENCE)


def test_more_sessions_than_files_is_said(make_daemon: MakeDaemon) -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))

    asked = make_daemon("--max-sessions", "500", preexec_fn=few_files)
    told = asked.log.wait_for("--max-sessions 500")
    assert " WARN " in told and "may open 300 files" in told and "about 50 sessions" in told
    asked.kill()
    default = make_daemon(preexec_fn=few_files)
    default.ready_line()
    assert "--max-sessions" not in default.log.text(), "nobody asked for so many"


@pytest.mark.parametrize("flag", ["--addr", "--listen"])
def test_an_address_is_written_alike_everywhere(daemon: Daemon, folder: Path, flag: str) -> None:
    """`kvlane status --listen` was unknown, and a path that does not begin with a slash was no address."""
    for address in (
        daemon.address,
        str(daemon.path),
        f"{folder.name}/kvlane.sock",
        f"./{folder.name}/kvlane.sock",
    ):
        for where in ((flag, address), ()):
            environment = clean_environment(**({} if where else {"KVLANE_ADDR": address}))
            told = run_kvlane("status", *where, cwd=folder.parent, env=environment)
            assert told.returncode == 0, told.stderr


def test_the_variable_of_engines_and_tools_serves_the_daemon_too(folder: Path) -> None:
    """A daemon in an environment with KVLANE_ADDR listened at its default socket, where its own tools did not look."""
    (folder / "all.toml").write_text(f'listen = ["unix:{folder}/file.sock"]\n')
    daemon = Daemon(folder, environment={"KVLANE_ADDR": str(folder / "kvlane.sock")})
    flags = (
        "--pool-size",
        "1mib",
        "--hugepages",
        "off",
        "--http",
        "off",
        "--config",
        str(folder / "all.toml"),
    )
    try:
        daemon.start_with(*flags)
        assert daemon.status()["blocks"] == 0
        assert daemon.stop() == 0
        daemon.environment["KVLANE_LISTEN"] = f"unix:{folder}/other.sock"
        daemon.start_with(*flags)
        assert (folder / "other.sock").exists() and not daemon.path.exists(), "its own variable comes first"
    finally:
        daemon.kill()
