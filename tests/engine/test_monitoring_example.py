"""The example of Prometheus and Grafana cannot be run here: its files are parsed, and what they name has to be there.

In this folder because vLLM's environment has a YAML parser. tests/docs/test_dashboards.py runs a real Prometheus.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import dashboards

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples/monitoring"
LOOPBACK = re.compile(r"(?:http://)?127\.0\.0\.1:(\d+)")


def parsed(path: str) -> Any:
    return yaml.safe_load((FOLDER / path).read_text())


def services() -> dict[str, dict[str, Any]]:
    return parsed("compose.yaml")["services"]


def mounts(service: dict[str, Any]) -> dict[str, tuple[Path | str, str]]:
    """Paths in the container, with the file or volume that is there, and the mode."""
    found: dict[str, tuple[Path | str, str]] = {}
    for mount in service["volumes"]:
        source, target, *mode = mount.split(":")
        found[target] = ((FOLDER / source).resolve() if source.startswith(".") else source, "".join(mode))
    return found


def program(name: str) -> str:
    command = ["python3", str(ROOT / "scripts/promtool.py"), "--path", name]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip())
    return found.stdout.strip()


def test_images_are_pinned_and_files_are_there_and_read_only() -> None:
    assert set(services()) == {"prometheus", "grafana"}
    for service in services().values():
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"])
        for source, mode in mounts(service).values():
            if isinstance(source, Path):
                assert source.exists() and mode == "ro"
            else:
                assert source in parsed("compose.yaml")["volumes"]


def test_nothing_listens_beyond_this_host() -> None:
    """In the host's network `ports` has no effect, so each program has to be told."""
    for service in services().values():
        assert service["network_mode"] == "host" and "ports" not in service
    flags = dict(word.split("=", 1) for word in services()["prometheus"]["command"])
    assert LOOPBACK.fullmatch(flags["--web.listen-address"])
    assert services()["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_prometheus_has_each_flag() -> None:
    told = subprocess.run([program("prometheus"), "--help"], capture_output=True, text=True, check=False)
    for word in services()["prometheus"]["command"]:
        assert f"{word.split('=')[0]}=" in told.stderr + told.stdout, word


def test_promtool_accepts_the_configuration_and_its_rules(tmp_path: Path) -> None:
    there = mounts(services()["prometheus"])
    config, _ = there["/etc/prometheus/prometheus.yml"]
    rules, _ = there["/etc/prometheus/rules"]
    shutil.copy(config, tmp_path)
    shutil.copytree(rules, tmp_path / "rules")
    command = [program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 rule files found" in done.stdout and "SUCCESS: " in done.stdout


def test_jobs_are_called_as_rules_and_dashboards_know_them() -> None:
    """And read the ports that daemon, router and vLLM have by default."""
    jobs = {job["job_name"]: job["static_configs"] for job in parsed("prometheus.yml")["scrape_configs"]}
    ports = {
        name: [LOOPBACK.fullmatch(target)[1] for each in static for target in each["targets"]]  # type: ignore[index]
        for name, static in jobs.items()
    }
    assert ports == {"kvlane": ["9091"], "kvlane-router": ["9092"], "vllm": ["8000"]}
    for command, port in (("serve", "9091"), ("route", "9092")):
        told = subprocess.run(
            ["kvlane", command, "--help"], capture_output=True, text=True, check=True
        ).stdout
        assert f"[default: 127.0.0.1:{port}]" in told
    variables = [variable for dashboard in dashboards.DASHBOARDS for variable in dashboard.variables]
    every = [variable.every for variable in variables if variable.label == "job"]
    assert [[name for name in jobs if re.fullmatch(each, name)] for each in every] == [
        ["kvlane"],
        ["kvlane-router"],
    ]


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    (source,) = parsed("provisioning/datasources/prometheus.yaml")["datasources"]
    flags = dict(word.split("=", 1) for word in services()["prometheus"]["command"])
    assert source["url"] == f"http://{flags['--web.listen-address']}"
    assert source["jsonData"]["timeInterval"] == parsed("prometheus.yml")["global"]["scrape_interval"]
    (provider,) = parsed("provisioning/dashboards/kvlane.yaml")["providers"]
    there = mounts(services()["grafana"])
    assert there[provider["options"]["path"]] == (FOLDER / "dashboards", "ro")
    folders = {
        PurePosixPath(target).name for target in there if target.startswith("/etc/grafana/provisioning/")
    }
    assert folders == {"datasources", "dashboards"}


def test_vllm_has_the_metrics_of_its_own_that_panels_name() -> None:
    # Found without importing vLLM, which takes seconds.
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.origin is not None
    source = (Path(package.origin).parent / "v1/metrics/loggers.py").read_text()
    named = [name for name in dashboards.FOREIGN if name.startswith("vllm:")]
    assert named
    for name in named:
        assert f'name="{name.removesuffix("_total")}"' in source, name
