"""`make demo` runs the wheel in dist/ if it was built from these sources; else it says how long building one takes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

WHEEL = "kvlane-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """scripts/environment.py of a checkout with one source file; a build makes an empty wheel."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    for name in ("cargo", "environment"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("environment")
    (tmp_path / "crates").mkdir()
    (tmp_path / "crates/lib.rs").write_text("fn one() {}\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "CACHE", tmp_path / ".cache")
    monkeypatch.setattr(module, "DIST", tmp_path / "dist", raising=False)
    monkeypatch.setattr(module, "SOURCES", ("crates",))
    monkeypatch.setattr(module, "build_wheel", lambda folder: (folder / "kvlane-0.1.0-built.whl").touch())
    (tmp_path / "dist").mkdir()
    return module


def make_wheel(environment: Any, folder: Path) -> Path:
    """Write the files that `make wheel` leaves in dist/."""
    wheel = folder / "dist" / WHEEL
    wheel.touch()
    # The stamp that scripts/environment.py keeps beside each of its own wheels too.
    (folder / "dist/made-from").write_text(environment._digest(folder / "crates"))
    return wheel


def test_the_wheel_in_dist_is_taken(
    environment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo built another wheel beside it, for minutes and without a word."""
    wheel = make_wheel(environment, tmp_path)
    assert environment._wheel(environment.FOR_USERS) == wheel
    assert capsys.readouterr().err == ""


def test_a_wheel_of_other_sources_is_not_taken(
    environment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_wheel(environment, tmp_path)
    (tmp_path / "crates/lib.rs").write_text("fn two() {}\n")
    assert environment._wheel(environment.FOR_USERS).name == "kvlane-0.1.0-built.whl"
    said = capsys.readouterr().err
    assert f"building the kvlane wheel, since dist/{WHEEL} is of other sources" in said
    assert "minutes" in said and "cargo says how far it is" in said


def test_a_wheel_that_does_not_say_what_it_is_of_is_not_taken(environment: Any, tmp_path: Path) -> None:
    make_wheel(environment, tmp_path)
    (tmp_path / "dist/made-from").unlink()
    assert environment._wheel(environment.FOR_USERS).name == "kvlane-0.1.0-built.whl"


def test_without_a_wheel_one_is_built_once(
    environment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built = environment._wheel(environment.FOR_USERS)
    assert "since there is none in dist/" in capsys.readouterr().err
    assert environment._wheel(environment.FOR_USERS) == built
    assert capsys.readouterr().err == ""


def test_tests_never_run_the_wheel_in_dist(
    environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests need assertions and fake GPUs, which the wheel in dist/ lacks."""
    make_wheel(environment, tmp_path)
    monkeypatch.setattr(environment, "_pack_for_tests", lambda folder: (folder / "kvlane-tests.whl").touch())
    assert environment._wheel(environment.FOR_TESTS).name == "kvlane-tests.whl"
