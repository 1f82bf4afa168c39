"""scripts/selection.py: a planted change in each crate and folder selects the stages that it can break."""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

import pytest
from pages import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import cargo
import selection

WITH_VLLM = {"engines", "oldest", "data-parallel"}
GRAPH = selection.crate_graph()
# Written by hand, so that a rule that is lost turns this red: stages beside fetch, build, lint, rust and python.
MORE_STAGES: dict[str, set[str]] = {
    "block": WITH_VLLM | {"miri"},
    "cli": WITH_VLLM,
    "client": WITH_VLLM,
    "cluster": WITH_VLLM,
    "door": WITH_VLLM,
    "engine-memory": WITH_VLLM,
    "fabric": WITH_VLLM,
    "fake-gpu": set(),
    "fleet": {"engines"},
    "fuzz-targets": set(),
    "gpu": WITH_VLLM,
    "handoff": WITH_VLLM,
    "index": WITH_VLLM,
    "kv-events": {"engines"},
    "memory": WITH_VLLM,
    "moe": WITH_VLLM | {"loom"},
    "otlp": WITH_VLLM,
    "policy": {"miri"},
    "proto": WITH_VLLM,
    "python": WITH_VLLM | {"packaging"},
    "router": {"engines"},
    "server": WITH_VLLM,
    "shm-ring": WITH_VLLM | {"loom"},
    "ssd": WITH_VLLM,
    "store": WITH_VLLM | {"miri"},
    "trace": WITH_VLLM,
    "zmtp": {"engines"},
}


def planted(*files: str) -> selection.Plan:
    return selection.plan(files, GRAPH)


def test_every_crate_has_a_row() -> None:
    assert set(GRAPH) == set(MORE_STAGES)


@pytest.mark.parametrize("crate", sorted(MORE_STAGES))
def test_a_change_in_a_crate_selects_what_it_can_break(crate: str) -> None:
    found = planted(f"crates/{crate}/src/lib.rs")
    python = set() if crate == "fuzz-targets" else {"python"}
    assert set(found.stages) == {"rust"} | python | MORE_STAGES[crate]
    assert found.crates is not None
    assert crate in found.crates
    assert all(
        crate in GRAPH[each] or each == crate for each in found.crates if not GRAPH[each] & found.crates
    )


def test_a_change_in_the_router_tests_its_users_and_of_engines_only_a_pair_behind_it() -> None:
    found = planted("crates/router/src/ids.rs", "crates/cli/src/route.rs")
    assert (found.crates, found.folders) == (
        {"router", "fleet", "fuzz-targets", "cli"},
        {"router", "bench", "docs"},
    )
    assert (set(found.stages) & WITH_VLLM, found.engines) == ({"engines"}, {"tests/engine/test_route_pd.py"})


def test_the_daemons_command_is_no_routers_command() -> None:
    assert set(planted("crates/cli/src/serve.rs").stages) >= WITH_VLLM


@pytest.mark.parametrize(
    ("file", "stages", "folders"),
    [
        ("docs/sizing.md", {"python"}, {"docs"}),
        ("docs/routing.md", {"python"}, {"docs", "router"}),
        ("docs/balance.md", {"rust", "python"}, {"docs"}),
        ("README.md", {"python"}, {"docs"}),
        (
            "python/kvlane/connector/direct.py",
            {"python", "packaging"} | WITH_VLLM,
            set(selection.PYTHON_FOLDERS),
        ),
        ("python/kvlane/testing/fake_engine/http.py", {"python"}, {"router", "bench", "docs"}),
        ("python/kvlane/bench/serve.py", {"python", "engines"}, {"bench", "docs"}),
        ("docs/start.md", {"python", "engines"}, {"docs"}),
        ("docs/reference/identity-fields.md", {"python"}, {"docs", "connector"}),
        ("tests/router/routed.py", {"python", "engines"}, {"router", "docs"}),
        ("tests/docs/monitored.py", {"python", "engines"}, {"docs"}),
        ("tests/router/test_route.py", {"python"}, {"router"}),
        ("tests/daemon/processes.py", {"python"}, set(selection.PYTHON_FOLDERS)),
        ("tests/connector/test_roles.py", {"python"}, {"connector"}),
        ("tests/connector/test_vllm_engine.py", {"python"} | WITH_VLLM, {"connector"}),
        ("tests/engine/served.py", {"python"} | WITH_VLLM, {"connector"}),
        ("tests/defects/01-x.patch", set(), set()),
        ("fuzz/fuzz.rs", set(), set()),
        ("scripts/dashboard_panels.py", {"python", "engines"}, {"docs"}),
        ("scripts/wheel.py", {"manylinux"}, set()),
        (
            "crates/python/core/Cargo.toml",
            {"rust", "python", "packaging", "manylinux"} | WITH_VLLM,
            set(selection.PYTHON_FOLDERS),
        ),
        ("scripts/manifests.py", {"engines"}, set()),
        ("tests/packaging/test_wheel.py", {"packaging", "manylinux"}, set()),
        (".ci/passed", set(), set()),
    ],
)
def test_a_change_outside_the_crates(file: str, stages: set[str], folders: set[str]) -> None:
    found = planted(file)
    assert (set(found.stages), found.folders) == (stages, folders)


def test_tests_that_read_a_page_run_when_it_changes() -> None:
    """By the pages that they name."""
    for folder in set(selection.PYTHON_FOLDERS) - {"docs"}:
        for test in (selection.ROOT / "tests" / folder).glob("*.py"):
            for page in re.findall(
                r'ROOT / "docs/(\w[\w-]*\.md)"|\] / "docs/(\w[\w-]*\.md)"', test.read_text()
            ):
                name = "".join(page)
                assert folder in selection.READERS.get(name, ()) or "test_vllm" in test.name, (
                    f"{test.name}: {name}"
                )


@pytest.mark.parametrize(
    "file",
    ["Cargo.lock", "Makefile", ".ci/run", "pyproject.toml", "scripts/environment.py", "a/new/folder.txt"],
)
def test_what_builds_the_rest_and_what_no_rule_knows_selects_everything(file: str) -> None:
    found = planted(file, "docs/routing.md")
    is_in_the_wheel = file in ("Cargo.lock", "pyproject.toml")
    wanted = [stage for stage in selection.STAGES if stage != "manylinux" or is_in_the_wheel]
    assert set(found.stages) == set(wanted)
    environments = "vllm-0.24 wheel" if is_in_the_wheel else "vllm-0.24"
    assert found.targets() == [f"fetch={environments}", *wanted[1:]], "nothing is narrowed"


def test_the_commands_that_run_name_crates_and_folders() -> None:
    targets = planted("crates/zmtp/src/lib.rs").targets()
    assert targets[:3] == ["fetch", "build", "lint"]
    assert targets[3:6] == [
        "rust=--workspace --only cli,fleet,fuzz-targets,router,zmtp",
        "python=tests/bench tests/docs tests/router",
        "engines=tests/engine/test_route_pd.py",
    ]


@pytest.mark.parametrize(
    ("tested", "flags"),
    [
        (None, "--workspace"),
        ("fleet,router", "-p kvlane -p kvlane-fleet -p kvlane-python -p kvlane-router"),
        # A change of a page: the environments alone.
        ("", "-p kvlane -p kvlane-python"),
    ],
)
def test_cargo_builds_the_crates_under_test_and_what_environments_hold(
    tested: str | None, flags: str
) -> None:
    assert " ".join(cargo.chosen(tested)) == flags


@pytest.mark.parametrize(
    "patch", sorted((ROOT / "tests/defects").glob("*.patch")), ids=lambda path: path.stem
)
def test_each_defect_selects_the_stage_that_finds_it(patch: Path) -> None:
    text = patch.read_text()
    found = planted(*re.findall(r"^\+\+\+ b/(\S+)", text, re.MULTILINE))
    part = re.search(r'^Found by: make (\w+) ARGS="?([^"\n]+)', text, re.MULTILINE)
    assert part is not None
    stage, arguments = part.groups()
    assert stage in found.stages
    if stage == "rust":
        assert found.crates is not None
        assert re.search(r"-p kvlane-([\w-]+)", arguments)[1] in found.crates  # type: ignore[index]
    elif stage == "python":
        assert found.folders is None or arguments.split("/")[1] in found.folders
    else:
        assert found.engines is None or any(arguments.startswith(path) for path in found.engines)


TODAY = datetime.date(2026, 11, 27)


def test_the_newest_commit_that_passed_all_stages_is_compared_with() -> None:
    known = selection.landings(
        "# date commit stages\n2026-11-25 aaa all\n2026-11-26 bbb all\n2026-11-26 ccc some\n"
    )
    assert selection.base(known, TODAY)[0] == "bbb"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("", "names no commit"),
        ("2026-11-26 aaa some\n", "names no commit"),
        ("2026-11-24 aaa all\n", "last passed on 2026-11-24"),
        ("2026-11-27 aaa all\n" + "2026-11-27 bbb some\n" * 10, "10 landings have followed"),
    ],
)
def test_where_the_last_whole_run_is_too_far_away_all_stages_run(lines: str, why: str) -> None:
    commit, sentence = selection.base(selection.landings(lines), TODAY)
    assert (commit, why in sentence) == (None, True), sentence


def test_the_repositorys_own_file_can_be_read() -> None:
    assert selection.landings(selection.PASSED.read_text())
