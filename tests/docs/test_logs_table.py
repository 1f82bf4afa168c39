"""scripts/logs_table.py finds every statement that writes to the log, and refuses those that it cannot explain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import logs_table
from logs_table import Line

ROOT = Path(__file__).parents[2]
DAEMON = "The daemon: `kvlane serve`"


def of_rust(source: str) -> tuple[list[Line], list[str]]:
    return logs_table.collect({"crates/server/src/listen.rs": source})


def of_python(source: str) -> tuple[list[Line], list[str]]:
    return logs_table.collect({"python/kvlane/connector/core.py": source})


@pytest.mark.parametrize(
    ("statement", "level", "text", "fields"),
    [
        ('tracing::warn!("it fails");', "warn", "it fails", ()),
        (
            'tracing::info!(%error, at = door.at(1, "a, b"), ?x.y, "it fails");',
            "info",
            "it fails",
            ("error", "at", "x.y"),
        ),
        ('tracing::error!(target: "kvlane", once = true, "it fails");', "error", "it fails", ("once",)),
        ('Err(error) => return tracing::warn!(%error, "it fails"),', "warn", "it fails", ("error",)),
        (
            "tracing::warn!(\n    once = true, // of each peer\n    limit = if x == 1 { 2 } else { 3 },\n"
            '    "it fails: {why} after {:.1} s, \\\n     {{retried}} {count:?} times",\n    end.as_secs(),\n);',
            "warn",
            "it fails: <why> after <...> s, {retried} <count> times",
            ("once", "limit"),
        ),
        ('tracing::info!(name = %path.display(), r#"it "fails""#);', "info", 'it "fails"', ("name",)),
        (
            "tracing::info!(\"it says \\\"no\\\", 'a' and {}\", ')');",
            "info",
            "it says \"no\", 'a' and <...>",
            (),
        ),
    ],
)
def test_statements_of_rust(statement: str, level: str, text: str, fields: tuple[str, ...]) -> None:
    lines, problems = of_rust(f"fn f() {{\n    // Log: a door | is shut. Do: open it.\n    {statement}\n}}\n")
    assert problems == []
    assert lines == [Line(DAEMON, level, text, fields, "a door | is shut.", "open it.")]


@pytest.mark.parametrize(
    "source",
    [
        'fn f() {\n    tracing::debug!("it works");\n    compile_error!("no");\n}\n',
        '// tracing::warn!("not code")\nconst TEXT: &str = "tracing::warn!(\\"not code\\")";\n/* tracing::info!() */',
        '#[cfg(test)]\nmod tests {\n    fn f() {\n        tracing::warn!("of a test");\n    }\n}\n',
    ],
)
def test_what_is_no_line_of_the_log(source: str) -> None:
    assert of_rust(source) == ([], [])


def test_a_comment_over_several_lines_behind_another_one_without_an_action() -> None:
    lines, problems = of_rust(
        "fn f() {\n    // The kernel may refuse.\n    // Log: a door\n    // is shut.\n"
        '    tracing::warn!("it fails");\n}\n'
    )
    assert (lines, problems) == ([Line(DAEMON, "warn", "it fails", (), "a door is shut.", "")], [])


@pytest.mark.parametrize(
    ("comment", "statement", "problem"),
    [
        ("", 'tracing::warn!("it fails");', "there is no comment `Log: meaning. Do: action.`"),
        ("// A door is shut.", 'tracing::warn!("it fails");', "there is no comment"),
        ("// Log: a door is shut", 'tracing::warn!("it fails");', "is not of the form"),
        ("// Log: a door is shut. Do: open it", 'tracing::warn!("it fails");', "is not of the form"),
        (f"// Log: {'word ' * 25}word.", 'tracing::warn!("it fails");', "more than 25 words"),
        ("// Log: a door is shut.", "tracing::warn!(%error);", "the message is not a literal"),
        ("// Log: a door is shut.", 'tracing::warn!(concat!("a", "b"));', "the message is not a literal"),
        ("// Log: a door is shut.", "tracing::warn!(error);", "the message is not a literal"),
        (
            "// Log: a door is shut.",
            'tracing::event!(Level::WARN, "it fails");',
            "write info!, warn! or error!",
        ),
        (
            "// Log: a door is shut.",
            'tracing::warn!("{why}: {}", 1);',
            "all of the message <why>: <...> varies",
        ),
        ('// Log "door": a door is shut.', 'tracing::warn!("it fails");', "has a text of its own"),
        (
            '// Log "a shut <door>": it is shut.',
            'tracing::warn!("{why}");',
            "the quoted text 'a shut' is in no source",
        ),
    ],
)
def test_a_statement_that_cannot_be_explained_is_named(comment: str, statement: str, problem: str) -> None:
    lines, problems = of_rust(f"fn f() {{\n    {comment}\n    {statement}\n}}\n")
    assert lines == []
    (found,) = problems
    assert found.startswith("crates/server/src/listen.rs:3: ")
    assert problem in found


def test_a_file_without_a_part_is_named() -> None:
    _, problems = logs_table.collect({"crates/new/src/lib.rs": '// Log: a.\ntracing::warn!("it fails");\n'})
    assert problems == ["crates/new/src/lib.rs:2: PARTS in scripts/logs_table.py has no part for this file"]


def test_a_text_that_varies_is_quoted_once_for_each_of_its_texts() -> None:
    lines, problems = of_rust(
        'fn say(why: &str) -> String {\n    format!("the {} is \\\n     shut: {why}", 1)\n}\nfn f() {\n'
        '    // Log "the <door> is shut: <why>": it is shut. Do: open it.\n    // Log "<why>": another door.\n'
        '    tracing::warn!(%at, "{note}");\n}\n'
    )
    assert problems == []
    assert [(line.text, line.meaning, line.action) for line in lines] == [
        ("the <door> is shut: <why>", "it is shut.", "open it."),
        ("<why>", "another door.", ""),
    ]
    assert {line.fields for line in lines} == {("at",)}


def test_statements_of_python() -> None:
    lines, problems = of_python(
        "def f():\n    # Log: a door is shut.\n    # Do: open it.\n    logger.warning(\n"
        '        "kvlane: %s is "\n        "shut for %.1f s, 5 %%",\n        door,\n    )\n'
        '    logger.log(level, "%s", text)\n    logger.debug("no")\n'
    )
    assert problems == []
    (line,) = lines
    assert (line.level, line.text) == ("warn", "kvlane: <...> is shut for <...> s, 5 %")
    assert (line.meaning, line.action) == ("a door is shut.", "open it.")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('logger.info("kvlane: it fails")\n', "core.py:1: there is no comment"),
        (
            '# Log: a door is shut.\nlogger.error(f"{door} is shut")\n',
            "core.py:2: the message is not a literal",
        ),
    ],
)
def test_a_statement_of_python_that_cannot_be_explained_is_named(source: str, problem: str) -> None:
    lines, (found,) = of_python(source)
    assert lines == []
    assert problem in found


def test_rows_are_ordered_by_level_then_text() -> None:
    lines = [
        Line(DAEMON, "info", "b", (), "vLLM is up.", ""),
        Line(DAEMON, "warn", "d | e", ("once", "at"), "a door.", "see docs/start.md#a-b."),
        Line(DAEMON, "warn", "C `x`", (), "`x` is shut.", ""),
    ]
    rows = [row for row in logs_table.page(lines).splitlines() if row.startswith(("| warn", "| info"))]
    assert rows == [
        "| warn | `` C `x` `` | `x` is shut. | - |",
        r"| warn | `d \| e` (once, at) | A door. | See [start.md](../start.md#a-b). |",
        "| info | `b` | vLLM is up. | - |",
    ]


def test_every_crate_that_logs_is_read() -> None:
    """The control of the page: a statement of each part is on it."""
    lines, problems = logs_table.collect(logs_table.sources(ROOT))
    assert problems == []
    assert {line.part for line in lines} == set(logs_table.PARTS)
    assert "socket was gone; the daemon made it again" in {line.text for line in lines}


def test_the_page_is_current(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts/logs_table.py")]
    page = ROOT / "docs/reference/logs.md"
    done = subprocess.run([*script, str(page), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stale = tmp_path / "logs.md"
    stale.write_text(page.read_text().replace("| warn |", "| info |", 1))
    assert subprocess.run([*script, str(stale), "--check"], capture_output=True, check=False).returncode == 1
    assert subprocess.run([*script, str(stale)], check=False).returncode == 0
    assert stale.read_text() == page.read_text()
