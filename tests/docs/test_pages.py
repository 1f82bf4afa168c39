"""What holds for README.md and every page of docs/: form, links, examples that parse, and numbers that the code has."""

from __future__ import annotations

import ast
import json
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import (
    GENERATED,
    PAGES,
    README,
    ROOT,
    SHELL,
    all_commands,
    anchors,
    blocks,
    links,
    name,
    prose,
    read,
    table,
)

from kvlane.connector.counters import COUNTERS
from kvlane.connector.settings import Settings

WRITTEN = [page for page in PAGES if GENERATED not in page.parents]


def test_the_readme_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    title, *rest = page.read_text().splitlines()
    assert re.match(r"# \S", title)
    first = next(line for line in rest if line)
    assert re.match(r"[A-Z`k]", first), f"{first!r} is no sentence"


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_lines_are_not_too_long(page: Path) -> None:
    """Rows of tables and pictures cannot be cut."""
    uncut = ("|", "!", "Machine: ")
    long = [number for number, line in prose(page) if len(line) > 130 and not line.startswith(uncut)]
    assert long == []


def broken(page: Path) -> list[str]:
    """The links of a page within the repository that lead nowhere."""
    found = []
    for line, link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            found.append(f"line {line}: there is no {link}")
        elif anchor and anchor not in anchors(target):
            found.append(f"line {line}: {target.name} has no heading {anchor}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    """The control of the test above. What stands in code is no link."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\nSee [this](#a-page), [that](#another) and [a\nthird](no.md), `[no](link)`.\n"
        '<img src="no.png" alt="">\n'
    )
    assert broken(page) == [
        "line 2: page.md has no heading another",
        "line 3: there is no no.md",
        "line 4: there is no no.png",
    ]


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs/README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for _, link in links(index)}
    assert [name(page) for page in PAGES if page not in (README, index) and page not in linked] == []


def test_ten_questions_have_an_answer() -> None:
    rows = table("docs/README.md", "| question |")
    assert len(rows) == 10
    assert all("](" in answer for _, answer in rows)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_examples_parse(page: Path) -> None:
    """JSON, what is given to vLLM as JSON, and Python. Programs read what is TOML in tests of their own."""
    for block in blocks(page):
        if block.language == "json":
            check_transfer(json.loads(block.text))
        elif block.language == "python":
            # `await` stands outside of a function, as in a notebook.
            compile(block.text, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        else:
            assert block.language in ("", "text", "toml", *SHELL), f"{block.place}: {block.language}"
    for command in all_commands():
        words = shlex.split(command.text)
        if "--kv-transfer-config" in words:
            check_transfer(json.loads(words[words.index("--kv-transfer-config") + 1]))


def check_transfer(config: dict[str, Any]) -> None:
    if "kv_connector" not in config:
        # Keys alone, which are to be added.
        Settings.parse(config)
        return
    assert config["kv_connector"] in ("KVLaneConnector", "P2pNcclConnector")
    assert config.get("kv_connector_module_path", "kvlane.connector") == "kvlane.connector"
    assert config["kv_role"] in ("kv_both", "kv_producer", "kv_consumer")
    Settings.parse(config.get("kv_connector_extra_config"))


@pytest.mark.parametrize(
    "script",
    [
        "settings_table.py docs/configure.md",
        "counters_table.py docs/reference/engine-metrics.md",
        "figures.py",
    ],
)
def test_what_is_made_from_code_is_up_to_date(script: str) -> None:
    command = [sys.executable, *(f"scripts/{script} --check").split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_stale_table_is_noticed(tmp_path: Path) -> None:
    """The control of the test above."""
    page = tmp_path / "configure.md"
    page.write_text(read("docs/configure.md").replace("`250`", "`251`"))
    script = [sys.executable, str(ROOT / "scripts/settings_table.py"), str(page)]
    assert subprocess.run([*script, "--check"], capture_output=True, check=False).returncode == 1
    assert subprocess.run(script, check=False).returncode == 0
    assert page.read_text() == read("docs/configure.md")


def test_the_versions_that_talk_are_those_of_the_code() -> None:
    wire = read("crates/proto/src/version.rs")
    bounds = [re.search(rf"WIRE_{end}: u32 = (\d+);", wire) for end in ("MIN", "MAX")]
    places = {
        "SSD file": ("crates/ssd/src/layout/superblock.rs", r"FORMAT_VERSION: u32 = (\d+);"),
        "namespaces": ("python/kvlane/connector/namespace.py", r'"version": (\d+),'),
        "fabric, greeting of a connection": ("crates/fabric/src/tcp/greeting.rs", r"VERSION: u8 = (\d+);"),
        "fabric, descriptor": ("crates/fabric/src/descriptor.rs", r"VERSION: u8 = (\d+);"),
    }
    wanted = {"wire between engine and daemon": " to ".join(bound[1] for bound in bounds if bound)}
    for what, (path, pattern) in places.items():
        (wanted[what],) = re.findall(pattern, read(path))
    assert {row[0]: row[1] for row in table("docs/operate.md", "| what | version |")} == wanted


def test_sizes_of_models_follow_the_formula() -> None:
    gib = 2**30
    for model, layers, heads, size, token, prompt, tokens in table("docs/sizing.md", "| model | layers |"):
        width = sum(map(int, size.split("+")))
        wanted = int(layers) * 2 * (2 * int(heads) * width if heads else width)
        assert float(token.removesuffix(" KiB")) == pytest.approx(wanted / 1024, abs=0.05), model
        assert float(prompt.removesuffix(" GiB")) == pytest.approx(10_000 * wanted / gib, abs=0.005), model
        assert int(tokens.replace(",", "")) == 16 * gib // wanted, model


def test_alerts_are_of_metrics_that_exist_and_stand_on_the_page() -> None:
    rules = read("examples/prometheus/kvlane-alerts.yaml")
    known = set(re.findall(r"`(kvlane_\w+)`", read("docs/reference/metrics.md")))
    known |= {f"vllm:kvlane_{counter}_total" for counter in COUNTERS}
    known |= {f"{name}_{part}" for name in known for part in ("bucket", "sum", "count")}
    for text in (rules, read("docs/operate.md")):
        used = set(re.findall(r"(?:vllm:)?kvlane_[a-z]\w*", text)) - {"kvlane_server"}
        assert used <= known, used - known
    listed = [(row[0], row[1]) for row in table("docs/operate.md", "| alert |")]
    found = re.findall(r"- alert: (\w+)\n(?:(?!- alert).*\n)*? *labels: \{severity: (\w+)\}", rules)
    assert found == listed
    assert rules.count("summary:") == rules.count("expr:") - rules.count("record:") == len(listed)


def test_each_counter_of_the_connector_is_on_a_page() -> None:
    """22 counters were on no page, so a reader could not learn what they count."""
    page = read("docs/reference/engine-metrics.md")
    missing = [counter for counter in COUNTERS if f"`vllm:kvlane_{counter}_total`" not in page]
    assert missing == []


def test_the_unit_and_its_settings_fit_each_other() -> None:
    unit = dict(re.findall(r"^(\w+)=(.*)$", read("examples/systemd/kvlane.service"), re.M))
    settings = dict(re.findall(r"^([\w-]+) = (.*)$", read("examples/systemd/kvlane.toml"), re.M))
    assert unit["Type"] == "notify"
    assert json.loads(settings["listen"]) == [f"unix:/run/{unit['RuntimeDirectory']}/kvlane.sock"]
    assert int(settings["drain-seconds"]) < int(unit["TimeoutStopSec"])
    assert unit["ExecStart"] == "/opt/kvlane/bin/kvlane serve --config /etc/kvlane.toml"


def test_headline_figures_are_those_of_the_committed_series() -> None:
    """The table of docs/performance.md is of these series; README's picture is of the one with graphs."""

    def found(name: str, mode: str) -> dict[str, dict[str, Any]]:
        runs = json.loads(read(f"bench/gpu/results/{name}.json"))["runs"]
        return {run["system"]: run["found"] for run in runs if run["mode"] == mode}

    eager = found("2026-11-22-h200-eager", "eager")
    graphs = found("2026-11-30-h200-one-after-the-other-kvlane-last", "graphs")
    rows = {row[0]: row[1:] for row in table("docs/performance.md", "| | eager | CUDA graphs |")}
    for shown, system in (("kvlane", "kvlane"), ("PegaFlow", "pegaflow"), ("vLLM's offload", "offload")):
        of = [(eager, "warm"), (graphs, "warm"), (graphs, "beside_decode_warm")]
        medians = [statistics.median(each["p50"] for each in runs[system][part]) for runs, part in of]
        # The table tells 146 ms without a decimal.
        assert [float(cell) for cell in rows[shown]] == pytest.approx(medians, abs=0.05, rel=0.002), shown
    computed = [eager["none"]["cold"]["p50"], graphs["kvlane"]["cold"]["p50"]]
    assert [float(cell) for cell in rows["computed again"][:2]] == pytest.approx(computed, abs=0.5)
