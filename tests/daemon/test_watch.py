"""`kvlane status --watch` goes on while the daemon is gone, and `kvlane completions` knows every command."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import KVLANE, PATIENCE, Daemon, Engine, clean_environment, run_kvlane


def watch(daemon: Daemon, *flags: str) -> subprocess.Popen[str]:
    command = [KVLANE, "status", "--watch", "0.1", "--addr", daemon.address, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment())


def read_until(process: subprocess.Popen[str], part: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if part in line:
            return line
    raise AssertionError(f"it ended without '{part}'")


def test_a_watched_daemon_may_go_and_come_back(daemon: Daemon) -> None:
    process = watch(daemon)
    try:
        read_until(process, "up ")
        read_until(process, "nothing was looked up")
        engine = Engine(daemon.address, "engine")
        engine.call("serve", requests=[("a", 4, 0), ("a", 4, 0)])
        assert "hits" in read_until(process, "looked-up blocks were hits")
        engine.close()
        daemon.kill()
        read_until(process, "kvlane serve")
        daemon.start()
        read_until(process, "nothing was looked up")
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


def test_json_is_a_line_each_time_and_a_reader_that_leaves_ends_it(daemon: Daemon) -> None:
    process = watch(daemon, "--json")
    assert process.stdout is not None
    for _ in range(2):
        assert json.loads(process.stdout.readline())["blocks"] == 0
    daemon.kill()
    assert "error" in json.loads(read_until(process, '"error"'))
    process.stdout.close()
    assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("interval", ["0", "-1", "soon", "1e9"])
def test_wrong_intervals_say_what_to_write(daemon: Daemon, interval: str) -> None:
    ran = run_kvlane("status", f"--watch={interval}", "--addr", daemon.address)
    assert ran.returncode == 2 and "number of seconds" in ran.stderr


def test_bash_completes_commands_and_flags(tmp_path: Path) -> None:
    script = tmp_path / "kvlane"
    script.write_text(run_kvlane("completions", "bash").stdout)
    bash = shutil.which("bash")
    assert bash is not None

    def completed(*words: str) -> list[str]:
        line = " ".join(words)
        listing = f". {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
        listing += f'; _kvlane kvlane "{words[-1]}" "{words[-2]}"'
        ran = subprocess.run(
            [bash, "-c", f'{listing}; printf "%s\\n" "${{COMPREPLY[@]}}"'],
            capture_output=True,
            text=True,
            check=True,
        )
        return ran.stdout.split()

    assert completed("kvlane", "rec") == ["record"]
    assert "--pool-size" in completed("kvlane", "serve", "--po")
    assert completed("kvlane", "route", "rec") == ["record"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_scripts_too(shell: str) -> None:
    script = run_kvlane("completions", shell).stdout
    assert all(command in script for command in ("serve", "record", "replay", "pool-size"))
