"""The chart in examples/helm/kvlane: Helm renders it with each feature on and off, and Kubernetes' schemas and kvlane
itself judge what comes out. No cluster has run it.

In this folder because vLLM's environment has a YAML parser. scripts/helm.py builds `helm`.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "examples/helm/kvlane"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())

sys.path.insert(0, str(ROOT / "scripts"))

import helm  # noqa: E402
import manifests  # noqa: E402

# The oldest schemas that kubernetes-validate has, which Chart.yaml names, and the newest ones.
KUBERNETES = ("1.25", "1.37")

DAEMON = {("DaemonSet", "kvlane")}
ROUTER = {
    ("Service", "engines"),
    ("Service", "router"),
    ("PodDisruptionBudget", "kvlane-router"),
    ("Deployment", "kvlane-router"),
}
INDEX = {
    ("Service", "kvlane-index"),
    ("PodDisruptionBudget", "kvlane-index"),
    ("Deployment", "kvlane-index"),
}


def on(*features: str) -> dict[str, Any]:
    """Values that enable these, such as "daemon.ssd"."""
    return switched(True, *features)


def switched(value: bool, *features: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for feature in features:
        put(values, f"{feature}.enabled", value)
    return values


def put(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *folders, name = path.split(".")
    at = values
    for folder in folders:
        at = at.setdefault(folder, {})
    at[name] = value
    return values


EVERYTHING = on("index", "podMonitor", "networkPolicy", "daemon.ssd", "daemon.hugepages")
EVERYTHING["index"]["tlsSecret"] = "kvlane-tls"

# Each feature on or off, and what is rendered then.
FEATURES: dict[str, tuple[dict[str, Any], set[tuple[str, str]]]] = {
    "defaults": ({}, DAEMON | ROUTER),
    "everything": (
        EVERYTHING,
        DAEMON
        | ROUTER
        | INDEX
        | {
            (kind, name)
            for kind in ("PodMonitor", "NetworkPolicy")
            for name in ("kvlane", "kvlane-router", "kvlane-index")
        },
    ),
    "without daemon": (switched(False, "daemon"), ROUTER),
    "without router": (switched(False, "router"), DAEMON),
    "nothing": (switched(False, "daemon", "router"), set()),
    "ssd": (on("daemon.ssd"), DAEMON | ROUTER),
    "huge pages": (on("daemon.hugepages"), DAEMON | ROUTER),
    "without gpu": (switched(False, "daemon.gpu"), DAEMON | ROUTER),
    "index": (on("index"), DAEMON | ROUTER | INDEX),
    "index alone": ({**on("index"), **switched(False, "daemon", "router")}, INDEX),
    "monitors": (
        on("podMonitor"),
        DAEMON | ROUTER | {("PodMonitor", "kvlane"), ("PodMonitor", "kvlane-router")},
    ),
    "policies": (
        on("networkPolicy"),
        DAEMON | ROUTER | {("NetworkPolicy", "kvlane"), ("NetworkPolicy", "kvlane-router")},
    ),
    "one replica each": (
        {"router": {"replicas": 1}, "index": {"enabled": True, "replicas": 1}},
        # A budget would forbid to drain the node of the only replica.
        (DAEMON | ROUTER | INDEX)
        - {("PodDisruptionBudget", "kvlane-router"), ("PodDisruptionBudget", "kvlane-index")},
    ),
}

# Another value for each one: a value that changes nothing would have no use.
OTHER_VALUES: dict[str, Any] = {
    "image.repository": "registry.example:5000/team/kvlane",
    "image.tag": "0.2.0",
    "image.pullSecrets": ["registry"],
    "daemon.enabled": False,
    "daemon.poolGib": 512,
    "daemon.otherMemoryGib": 4,
    "daemon.cpu": 2,
    "daemon.drainSeconds": 60,
    "daemon.socketFolder": "/run/other",
    "daemon.extraArgs": ["--policy", "auto"],
    "daemon.nodeSelector": {"pool": "h200"},
    "daemon.tolerations": [{"key": "team", "operator": "Equal", "value": "llm", "effect": "NoExecute"}],
    "daemon.capabilities.sysPtrace": False,
    "daemon.capabilities.sysNice": False,
    "daemon.capabilities.ipcLock": False,
    "daemon.gpu.enabled": False,
    "daemon.gpu.runtimeClassName": "",
    "daemon.gpu.privileged": True,
    "daemon.gpu.nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
    "daemon.gpu.tolerations": [],
    "daemon.hugepages.enabled": False,
    "daemon.ssd.enabled": False,
    "daemon.ssd.disks": [
        {"path": "/mnt/nvme0", "capacity": "1.5tb"},
        {"path": "/mnt/nvme1", "capacity": "2tb"},
    ],
    "daemon.ssd.writeRate": "500mb",
    "router.enabled": False,
    "router.replicas": 3,
    "router.keysSecret": "other-keys",
    "router.engines": [
        {"name": "prefill", "role": "prefill", "selector": {"app": "p"}, "port": 8100},
        {"name": "decode", "role": "decode", "selector": {"app": "d"}, "port": 8200},
    ],
    "router.drainDelaySeconds": 5,
    "router.drainSeconds": 300,
    "router.extraArgs": ["--quiet-decisions"],
    "router.resources.requests": {"cpu": "4"},
    "router.resources.limits": {"memory": "8Gi"},
    "index.enabled": False,
    "index.replicas": 3,
    "index.tokenSecret": "other-token",
    "index.tlsSecret": "",
    "index.extraArgs": ["--log", "debug"],
    "index.resources.requests": {"cpu": "500m"},
    "index.resources.limits": {"memory": "4Gi"},
    "podMonitor.enabled": False,
    "podMonitor.interval": "1m",
    "podMonitor.labels": {"release": "prometheus"},
    "networkPolicy.enabled": False,
    "networkPolicy.clientsFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    "networkPolicy.metricsFrom": [],
}


def run_helm(*words: str) -> subprocess.CompletedProcess[str]:
    program = helm.find()
    if program is None:
        pytest.skip("there is no helm: run python scripts/helm.py")
    return subprocess.run(
        [str(program), *words], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )


@functools.cache
def _rendered(values: str, *words: str) -> subprocess.CompletedProcess[str]:
    return run_helm(*words, "kvlane", str(CHART), "--namespace", "prod", "--set-json", values)


def template(values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    # --set-json takes an object whose keys are those of values.yaml.
    return _rendered(json.dumps(values), "template")


def render(values: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """The documents, by kind and name."""
    done = template(values)
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.safe_load_all(done.stdout) if document is not None]
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(found) == len(documents)
    return found


def refusal(values: dict[str, Any]) -> str:
    done = template(values)
    assert done.returncode != 0, values
    return done.stderr


def leaves(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values by their paths. Maps whose keys the user chooses, such as labels, are values."""
    for name, value in node.items():
        here = f"{path}.{name}" if path else name
        if isinstance(value, dict) and "properties" in schema_of(here):
            yield from leaves(value, here)
        else:
            yield here, value


def folders(node: dict[str, Any], path: str = "") -> Iterator[str]:
    """The paths of maps with fixed keys, the whole ("") too."""
    yield path
    for name, value in node.items():
        here = f"{path}.{name}" if path else name
        if isinstance(value, dict) and "properties" in schema_of(here):
            yield from folders(value, here)


def schema_of(path: str) -> dict[str, Any]:
    schema = SCHEMA
    for name in path.split("."):
        schema = schema["properties"][name]
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].removeprefix("#/definitions/")]
    return schema


def container(document: Any) -> Any:
    (found,) = document["spec"]["template"]["spec"]["containers"]
    return found


def commands(documents: dict[tuple[str, str], Any]) -> Iterator[list[str]]:
    """What the containers run, each with `kvlane` before it."""
    for (kind, _), document in documents.items():
        if kind in ("DaemonSet", "Deployment"):
            box = container(document)
            yield box["command"] if "command" in box else ["kvlane", *box["args"]]


def flags(words: list[str]) -> dict[str, str]:
    """The flags behind `kvlane SUBCOMMAND`. A flag that is there more than once keeps its last value."""
    found: dict[str, str] = {}
    for word in words[2:]:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            found[flag] = value
    return found


@functools.cache
def help_of(*subcommand: str) -> str:
    done = subprocess.run(
        ["kvlane", *subcommand, "--help"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_manifests_are_what_the_chart_renders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_helm("version")
    monkeypatch.setattr(sys, "argv", ["manifests.py", "--check"])
    manifests.main()
    assert capsys.readouterr().out == ""
    # The control: one that somebody has edited.
    (tmp_path / "examples").mkdir()
    edited = shutil.copytree(ROOT / "examples/kubernetes", tmp_path / "examples/kubernetes")
    file = edited / "daemon.yaml"
    file.write_text(file.read_text().replace("64gib", "65gib"))
    monkeypatch.setattr(manifests, "MANIFESTS", edited)
    with pytest.raises(SystemExit, match=r"out of date \(daemon\.yaml\): run python scripts/manifests\.py$"):
        manifests.main()


def test_the_manifests_have_the_lines_and_reasons_that_a_reader_of_one_file_needs() -> None:
    for name in manifests.FILES:
        text = (ROOT / "examples/kubernetes" / name).read_text()
        assert not re.search(r" $|\{\{|# Source|<no value>", text, re.M), name
        assert all(len(line) <= 130 for line in text.splitlines()), name
    daemon = (ROOT / "examples/kubernetes/daemon.yaml").read_text()
    for capability in ("SYS_PTRACE", "SYS_NICE"):
        assert re.search(rf"^ +# .+\n +- {capability}$", daemon, re.M), f"{capability} has no reason"


@pytest.mark.parametrize("feature", FEATURES)
def test_helm_lints_it(feature: str) -> None:
    done = run_helm("lint", "--strict", str(CHART), "--set-json", json.dumps(FEATURES[feature][0]))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("feature", FEATURES)
def test_kubernetes_takes_what_is_rendered(feature: str) -> None:
    values, wanted = FEATURES[feature]
    documents = render(values)
    assert set(documents) == wanted
    for (kind, _), document in documents.items():
        if kind != "PodMonitor":
            # Strict: a key that the schema does not have is refused.
            for version in KUBERNETES:
                kubernetes_validate.validate(document, version, strict=True)
        else:
            # The operator's own kind is not among Kubernetes' schemas.
            assert document["apiVersion"] == "monitoring.coreos.com/v1"
            assert set(document["spec"]) == {"selector", "podMetricsEndpoints"}


@pytest.mark.parametrize("name", sorted(path.name for path in manifests.MANIFESTS.glob("*.yaml")))
def test_kubernetes_takes_the_manifests(name: str) -> None:
    """That of the engine too, which is no part of the chart."""
    for document in yaml.safe_load_all((manifests.MANIFESTS / name).read_text()):
        if document["kind"] != "PodMonitor":
            for version in KUBERNETES:
                kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_refuse_a_key_that_kubernetes_does_not_have() -> None:
    """The control of the test above."""
    document = copy.deepcopy(render({})["DaemonSet", "kvlane"])
    document["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES[0], strict=True)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_flag_exists_and_kvlane_takes_its_value(feature: str, tmp_path: Path) -> None:
    """The daemon and the index get as far as the name of a host that is none, which they look at last."""
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    for command in commands(render(FEATURES[feature][0])):
        known = help_of(command[1])
        for flag in flags(command):
            assert re.search(rf"^ +{flag}( <|$)", known, re.M), f"{flag} is no flag of kvlane {command[1]}"
        told = run_command(command, token)
        if command[1] == "route":
            assert "--api-key-file /etc/kvlane/keys: cannot be read" in told
        else:
            assert "--http-host 'no/name' is no name" in told


def run_command(command: list[str], token: Path) -> str:
    """What kvlane says about the flags, without serving anybody."""
    words = [
        word.replace("$(POD_IP)", "10.0.0.1").replace("/etc/kvlane-cluster/token", str(token))
        for word in command
    ]
    if command[1] != "route":
        words.append("--http-host=no/name")
    if command[1] == "serve" and "--gpu=off" not in words:
        words.append("--gpu=off")
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    return done.stderr


def test_kvlane_refuses_a_flag_and_a_size_that_are_none(tmp_path: Path) -> None:
    """The control of the test above: these pass the chart's schema."""
    token = tmp_path / "token"
    for extra, told in (
        (["--no-such-flag=1"], "unexpected argument '--no-such-flag'"),
        (["--ssd=/disk:abc"], "'abc' is no size"),
    ):
        (command,) = commands(render({"daemon": {"extraArgs": extra}, **switched(False, "router")}))
        assert told in run_command(command, token)


def test_memory_probes_and_grace_follow_from_the_values() -> None:
    for values, memory, pages in (
        ({"poolGib": 700, "otherMemoryGib": 8, "drainSeconds": 45}, "708Gi", None),
        (
            {"poolGib": 700, "otherMemoryGib": 8, "drainSeconds": 45, "hugepages": {"enabled": True}},
            "8Gi",
            "700Gi",
        ),
    ):
        document = render({"daemon": values})["DaemonSet", "kvlane"]
        box = container(document)
        assert flags(["kvlane", *box["args"]])["--pool-size"] == "700gib"
        for of in ("requests", "limits"):
            assert box["resources"][of]["memory"] == memory
            assert box["resources"][of].get("hugepages-2Mi") == pages
        probe = box["startupProbe"]
        # Pinning takes about 0.3 s a GiB (docs/containers.md).
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 700
        assert document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 45
    router = render({"router": {"drainDelaySeconds": 7, "drainSeconds": 100}})["Deployment", "kvlane-router"]
    assert flags(container(router)["command"])["--drain"] == "100"
    assert router["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 107


def test_each_ssd_is_a_folder_of_the_node_under_its_own_path() -> None:
    disks = OTHER_VALUES["daemon.ssd.disks"]
    document = render({"daemon": {"ssd": {"enabled": True, "disks": disks}}})["DaemonSet", "kvlane"]
    box, pod = container(document), document["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in box["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for disk in disks:
        assert f"--ssd={disk['path']}:{disk['capacity']}" in box["args"]
        assert volumes[mounts[disk["path"]]]["hostPath"]["path"] == disk["path"]
    assert "IPC_LOCK" in box["securityContext"]["capabilities"]["add"]


def test_a_daemon_without_gpus_asks_for_none() -> None:
    document = render(switched(False, "daemon.gpu"))["DaemonSet", "kvlane"]
    pod = document["spec"]["template"]["spec"]
    assert not {"runtimeClassName", "nodeSelector", "tolerations"} & set(pod)
    assert "env" not in container(document)
    assert "--gpu=off" in container(document)["args"]
    # Everywhere: the daemon takes GPUs through the runtime, so that all of them stay free for engines.
    assert "nvidia.com/gpu" not in json.dumps(container(render({})["DaemonSet", "kvlane"])["resources"])


def test_daemons_and_replicas_of_the_index_meet() -> None:
    documents = render(EVERYTHING)
    daemon, index = documents["DaemonSet", "kvlane"], documents["Deployment", "kvlane-index"]
    service = documents["Service", "kvlane-index"]
    served, replica = flags(["kvlane", *container(daemon)["args"]]), flags(container(index)["command"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == index["spec"]["template"]["metadata"]["labels"]
    port = service["spec"]["ports"][0]["port"]
    assert served["--index"] == f"{service['metadata']['name']}:{port}"
    assert replica["--listen"] == f"0.0.0.0:{port}"
    assert replica["--advertise"] == f"$(POD_IP):{port}"
    assert served["--cluster-advertise"] == f"$(POD_IP):{served['--cluster-listen'].rpartition(':')[2]}"
    for flag in ("token-file", "tls-certificate", "tls-key", "tls-authority"):
        file = Path(replica[f"--{flag}"])
        assert Path(served[f"--cluster-{flag}"]) == file
        for document in (daemon, index):
            (mount,) = [
                each for each in container(document)["volumeMounts"] if each["mountPath"] == str(file.parent)
            ]
            (volume,) = [
                each
                for each in document["spec"]["template"]["spec"]["volumes"]
                if each["name"] == mount["name"]
            ]
            # kvlane refuses a token that others may read.
            assert volume["secret"]["defaultMode"] == 0o400
            assert "POD_IP" in [each["name"] for each in container(document)["env"]]


def test_a_router_finds_engines_by_role() -> None:
    values = {"router": {"engines": OTHER_VALUES["router.engines"]}}
    documents = render(values)
    command = container(documents["Deployment", "kvlane-router"])["command"]
    assert [word for word in command if "-dns=" in word] == [
        "--prefill-dns=prefill:8100",
        "--decode-dns=decode:8200",
    ]
    assert documents["Service", "decode"]["spec"]["selector"] == {"app": "d"}
    assert ("Service", "engines") not in documents


def test_monitors_scrape_ports_that_are_there_under_the_jobs_of_the_alerts() -> None:
    documents = render(EVERYTHING)
    for (kind, name), document in documents.items():
        if kind != "PodMonitor":
            continue
        (endpoint,) = document["spec"]["podMetricsEndpoints"]
        pod = pods(documents)[name]
        assert document["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
        assert endpoint["port"] in ports(pod)
        assert endpoint["path"] == "/metrics"
    rules = (ROOT / "examples/prometheus/kvlane-alerts.yaml").read_text()
    jobs = set(re.findall(r'job=~"(.+?)"', rules))
    assert len(jobs) == 2
    for job in jobs:
        assert any(re.fullmatch(job, f"prod/{name}") for name in pods(documents))


def pods(documents: dict[tuple[str, str], Any]) -> dict[str, Any]:
    return {
        name: document["spec"]["template"]
        for (kind, name), document in documents.items()
        if kind in ("DaemonSet", "Deployment")
    }


def ports(pod: Any) -> dict[str, int]:
    (box,) = pod["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in box["ports"]}


def doors(values: dict[str, Any]) -> dict[str, dict[int, list[Any]]]:
    """App: port: peers that the policies let in. A port that is not here is closed."""
    documents = render(values)
    found: dict[str, dict[int, list[Any]]] = {}
    for (kind, name), document in documents.items():
        if kind == "NetworkPolicy":
            spec = document["spec"]
            pod = pods(documents)[name]
            assert spec["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
            assert spec["policyTypes"] == ["Ingress"]
            found[name] = {}
            for rule in spec["ingress"]:
                # A rule without peers would let everybody in.
                assert rule["from"]
                (port,) = rule["ports"]
                found[name][ports(pod)[port["port"]]] = rule["from"]
    return found


def app(name: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {"app": name}}}


PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
CLIENTS = {"podSelector": {}}


def test_policies_open_the_doors_of_the_security_page_to_those_who_need_them() -> None:
    assert doors(on("networkPolicy")) == {
        "kvlane": {9091: [PROMETHEUS]},
        "kvlane-router": {8000: [CLIENTS], 9092: [PROMETHEUS]},
    }
    assert doors(on("networkPolicy", "index")) == {
        "kvlane": {9091: [PROMETHEUS], 9555: [app("kvlane"), app("kvlane-index")]},
        "kvlane-router": {8000: [CLIENTS], 9092: [PROMETHEUS]},
        "kvlane-index": {9556: [app("kvlane")], 9093: [PROMETHEUS]},
    }
    # With a list that is empty nobody comes in, instead of everybody.
    closed = on("networkPolicy", "index")
    closed["networkPolicy"] |= {"clientsFrom": [], "metricsFrom": []}
    assert doors(closed) == {
        "kvlane": {9555: [app("kvlane"), app("kvlane-index")]},
        "kvlane-router": {},
        "kvlane-index": {9556: [app("kvlane")]},
    }


def test_the_ports_of_the_policies_are_those_that_the_security_page_and_the_flags_name() -> None:
    documents = render(EVERYTHING)
    opened = {port for policy in doors(EVERYTHING).values() for port in policy}
    listened = {
        int(value.rpartition(":")[2])
        for command in commands(documents)
        for flag, value in flags(command).items()
        if flag in ("--listen", "--http", "--admin", "--cluster-listen")
    }
    declared = {port for pod in pods(documents).values() for port in ports(pod).values()}
    assert opened == listened == declared
    page = (ROOT / "docs/security.md").read_text() + (ROOT / "docs/cluster.md").read_text()
    for port in opened:
        assert f"127.0.0.1:{port}" in page


def wrong(value: Any) -> Any:
    """A value of another type."""
    return "yes" if isinstance(value, bool | int | list | dict) else ["a", "list"]


def test_a_value_of_another_type_is_refused_by_its_name() -> None:
    for path, value in leaves(VALUES):
        told = refusal(put({}, path, wrong(value)))
        assert f"at '/{path.replace('.', '/')}': got " in told, told


def test_a_value_that_is_removed_is_missed() -> None:
    for path, _ in leaves(VALUES):
        folder, _, name = path.rpartition(".")
        told = refusal(put({}, path, None))
        assert f"at '{f'/{folder}' if folder else ''}'".replace(".", "/") in told, told
        assert f"missing property '{name}'" in told, told


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("daemon.poolGib", 0),
        ("daemon.poolGib", 1.5),
        ("daemon.cpu", "two"),
        ("daemon.drainSeconds", -1),
        ("daemon.socketFolder", "run/kvlane"),
        ("daemon.ssd.disks", []),
        ("daemon.ssd.disks", [{"path": "/ssd"}]),
        ("daemon.ssd.disks", [{"path": "/ssd:1", "capacity": "1gb"}]),
        ("daemon.ssd.disks", [{"path": "/ssd", "capacity": "1 gigabyte"}]),
        ("daemon.ssd.writeRate", "fast"),
        ("daemon.tolerations", [{"key": "a", "effect": "Never"}]),
        ("daemon.nodeSelector", {"gpu": True}),
        ("image.pullSecrets", ["Not A Name"]),
        ("router.replicas", 0),
        ("router.engines", []),
        ("router.engines", [{"name": "e", "role": "both", "selector": {}, "port": 8000}]),
        ("router.engines", [{"name": "e", "role": "worker", "selector": {"app": "e"}, "port": 80000}]),
        # A service without a selector has no addresses.
        ("router.engines", [{"name": "e", "role": "worker", "selector": {}, "port": 8000}]),
        ("podMonitor.interval", "often"),
        # A peer without a word is everybody.
        ("networkPolicy.clientsFrom", [{}]),
    ],
)
def test_a_value_that_cannot_work_is_refused(path: str, value: Any) -> None:
    assert f"at '/{path.replace('.', '/')}" in refusal(put({}, path, value))


def test_a_key_that_is_not_known_is_refused_by_its_name_and_place() -> None:
    for folder in folders(VALUES):
        told = refusal(put({}, f"{folder}.noSuchKey" if folder else "noSuchKey", 1))
        place = f"/{folder.replace('.', '/')}" if folder else ""
        assert f"at '{place}': additional properties 'noSuchKey' not allowed" in told, told


def test_schema_and_values_have_the_same_keys_and_all_are_required() -> None:
    for folder in folders(VALUES):
        schema = schema_of(folder) if folder else SCHEMA
        node = functools.reduce(lambda at, name: at[name], folder.split("."), VALUES) if folder else VALUES
        assert set(schema["properties"]) - {"global"} == set(node) == set(schema["required"]), folder
        assert schema["additionalProperties"] is False


def test_every_value_has_a_comment_of_one_line_and_a_use() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    paths: list[str] = []
    stack: list[str] = []
    known = dict(leaves(VALUES))
    parts = set(folders(VALUES))
    for before, line in zip(["", *lines], lines, strict=False):
        found = re.match(r"( *)([A-Za-z]+):", line)
        if found is None:
            continue
        stack[len(found[1]) // 2 :] = [found[2]]
        path = ".".join(stack)
        if path in known:
            paths.append(path)
            # Requests and limits of a container have their comment before `resources`.
            if not path.endswith((".requests", ".limits")):
                assert re.match(r" *# [A-Z].*[^,]$", before), f"{path} has no comment"
        else:
            assert path in parts or any(path.startswith(f"{each}.") for each in known), path
    assert paths == list(known)
    assert set(OTHER_VALUES) == set(known)
    for path, value in OTHER_VALUES.items():
        values = put(copy.deepcopy(EVERYTHING), path, value)
        assert render(values) != render(EVERYTHING), f"{path} changes nothing"


def test_flags_of_the_user_come_last_and_as_they_are() -> None:
    values = {
        "daemon": {"extraArgs": ["--policy", "auto", "--log=info,kvlane_server=debug"]},
        "router": {"extraArgs": ["--quiet-decisions"]},
    }
    daemon, router = (command for command in commands(render(values)))
    assert daemon[-3:] == ["--policy", "auto", "--log=info,kvlane_server=debug"]
    assert router[-1] == "--quiet-decisions"


def notes(values: dict[str, Any]) -> str:
    done = _rendered(json.dumps(values), "install", "--dry-run=client")
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\nNOTES:\n")[2]


@pytest.mark.parametrize("feature", FEATURES)
def test_the_notes_name_commands_and_objects_that_exist(feature: str) -> None:
    values, _ = FEATURES[feature]
    documents = render(values)
    known = {f"{kind.lower()}/{name}" for kind, name in documents}
    secrets = {
        volume["secret"]["secretName"]
        for pod in pods(documents).values()
        for volume in pod["spec"]["volumes"]
        if "secret" in volume
    }
    told = notes(values)
    made: set[str] = set()
    lines = [shlex.split(line, comments=True) for line in told.splitlines() if line.startswith("     ")]
    for words in filter(None, lines):
        if words[0] != "kubectl":
            assert words[0] == "head"
            continue
        assert words[1:3] == ["--namespace", "prod"]
        match words[3:]:
            case ["create", "secret", "generic", name, *files]:
                made.add(name)
                assert all(file.startswith("--from-file=") for file in files)
            case ["rollout", "status", what]:
                assert what in known
            case ["exec", what, "--", "kvlane", *subcommand]:
                assert what in known
                help_of(*subcommand)
            case ["port-forward", what, port]:
                assert what in known
                pod = pods(documents)[what.partition("/")[2]]
                assert int(port) in ports(pod).values()
            case ["apply", "-f", file]:
                assert (ROOT / file).exists()
            case _:
                raise AssertionError(words)
    assert made == secrets
    services = re.findall(r"http://([a-z-]+)\.prod\.svc:(\d+)", told)
    assert services == ([("router", "8000")] if ("Service", "router") in documents else [])


def test_the_files_of_secrets_in_the_notes_are_those_that_flags_name() -> None:
    told = notes(EVERYTHING)
    named = set(re.findall(r"--from-file=(\S+)", told))
    wanted = {
        Path(value).name
        for command in commands(render(EVERYTHING))
        for value in flags(command).values()
        if value.startswith("/etc/kvlane")
    }
    assert named == wanted


def test_versions_are_those_of_the_package() -> None:
    (version,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version
    assert chart["kubeVersion"] == f">={KUBERNETES[0]}.0-0"
    for document in pods(render({})).values():
        assert document["spec"]["containers"][0]["image"] == f"kvlane:{version}"


def test_another_chart_can_depend_on_it(tmp_path: Path) -> None:
    """Helm gives a chart that is a part of another one the value `global`."""
    parent = tmp_path / "parent"
    shutil.copytree(CHART, parent / "charts/kvlane")
    (parent / "Chart.yaml").write_text("apiVersion: v2\nname: parent\nversion: 1.0.0\n")
    done = run_helm("template", "any", str(parent), "--set", "global.site=x,kvlane.daemon.poolGib=8")
    assert done.returncode == 0, done.stderr
    assert "--pool-size=8gib" in done.stdout


def test_helm_takes_what_the_pages_say(tmp_path: Path) -> None:
    """docs/containers.md and the chart's README: commands, and the files that they name."""
    taken = 0
    for page in (ROOT / "docs/containers.md", CHART / "README.md"):
        text = page.read_text()
        for block in re.findall(r"^```yaml\n# (.+)\n((?:.*\n)*?)^```", text, re.M):
            (tmp_path / block[0]).write_text(block[1])
        for block in re.findall(r"^```sh\n((?:.*\n)*?)^```", text, re.M):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:2] != ["helm", "upgrade"]:
                    continue
                assert words[2:4] == ["--install", "kvlane"]
                words = [str(tmp_path / word) if (tmp_path / word).is_file() else word for word in words]
                # There is no cluster to ask what is installed; an installation takes the same words.
                done = run_helm("install", *words[3:], "--dry-run=client")
                assert done.returncode == 0, (line, done.stderr)
                taken += 1
    assert taken == 2
