"""scripts/circles.py, by which `make lint` keeps files of a crate from importing each other in a circle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pages import ROOT


def output(folder: Path, files: dict[str, str]) -> str:
    """What the script says of a crate of these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, str(ROOT / "scripts/circles.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if done.stdout else 0), done.stderr
    return done.stdout


def test_files_that_only_import_downwards_are_fine(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod a;\nmod b;\nmod parts;\npub use a::A;\npub use parts::P;\n",
        "a.rs": "use crate::b::B;\npub struct A(B);\n#[cfg(test)]\nmod tests {\n    use crate::lib_user::X;\n}\n",
        "b.rs": "// crate::a::A uses this\npub struct B(crate::P);\n"
        "#[cfg(test)]\npub(super) mod tests {\n    use crate::a::A;\n}\n",
        "parts.rs": "pub mod p;\npub use self::p::P;\n",
        "parts/p.rs": "pub struct P;\nimpl P {\n    pub(super) fn p() {}\n}\n",
    }
    assert output(tmp_path, files) == ""


def test_a_circle_is_named_with_its_files(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod a;\nmod b;\nmod parts;\nmod apart;\npub use a::A;\n",
        "a.rs": "use crate::{\n    apart::Z,\n    b::{self, B},\n};\npub struct A(B);\n",
        "b.rs": "pub struct B;\nfn f() -> crate::parts::p::P {}\n",
        "parts.rs": "pub mod p;\n",
        "parts/p.rs": "use super::super::A;\npub struct P;\n",
        "apart.rs": "pub struct Z;\n",
    }
    assert output(tmp_path, files).strip().endswith("these files import each other: a, b, parts::p")


def test_a_step_up_inside_braces_counts_from_where_the_braces_stand(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod low;\nmod parts;\n",
        "low.rs": "pub struct L;\n",
        "parts.rs": "pub mod p;\nuse self::p::P;\n",
        "parts/p.rs": "use super::{\n    super::low::L,\n};\npub struct P(L);\n",
    }
    assert output(tmp_path, files) == ""


def test_a_file_that_takes_a_re_exported_name_imports_the_file_that_re_exports_it(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod engine;\nmod regions;\npub use engine::Error;\n",
        "engine.rs": "mod error;\npub(crate) use error::{Error as Fault, Error};\nuse crate::regions::Region;\n",
        "engine/error.rs": "pub struct Error;\n",
        "regions.rs": "use crate::engine::Fault;\npub struct Region;\n",
    }
    assert output(tmp_path, files).strip().endswith("these files import each other: engine, regions")
    cut = "use crate::engine::error::Error;\npub struct Region;\n"
    assert output(tmp_path, files | {"regions.rs": cut}) == ""


def test_a_submodule_that_takes_a_name_from_its_parent_closes_a_circle_if_the_parent_uses_it(
    tmp_path: Path,
) -> None:
    files = {
        "lib.rs": "mod parts;\n",
        "parts.rs": "mod low;\nmod p;\npub use low::L;\npub fn f() {\n    p::g();\n}\n",
        "parts/low.rs": "pub struct L;\n",
        "parts/p.rs": "use super::L;\npub fn g() -> L {}\n",
    }
    assert output(tmp_path, files).strip().endswith("these files import each other: parts, parts::p")
    assert output(tmp_path, files | {"parts.rs": "mod low;\nmod p;\npub use low::L;\n"}) == "", (
        "a declaration imports"
    )


def test_lib_rs_that_uses_a_file_which_uses_it_closes_a_circle(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod a;\npub fn f() {\n    a::g();\n}\n",
        "a.rs": "pub fn g() {\n    crate::f();\n}\n",
    }
    assert output(tmp_path, files).strip().endswith("these files import each other: lib, a")


def test_without_folders_every_crate_is_covered() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import circles

    covered = {path.resolve() for path in circles.every_crate()}
    assert covered == {path.parent / "src" for path in ROOT.glob("crates/**/Cargo.toml")}
