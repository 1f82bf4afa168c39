"""Our overrides against the base classes of every vLLM at hand, without importing any of them.

Base classes come from the folder KVLANE_CONTRACT_BASES (base-0.33.0.py, ...) and from an installed vLLM.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest

import kvlane

CONNECTOR = Path(kvlane.__file__).parent / "connector" / "connector.py"
BASE_PATH = "distributed/kv_transfer/kv_connector/v1/base.py"
# Newer than the oldest base or older than the newest; vLLM calls them where it knows them.
NOT_EVERYWHERE = {
    "get_transfer_results",
    "has_pending_block_frees",
    "prefer_cross_layer_blocks",
    "register_cross_layers_kv_cache",
    "requires_kv_delivery",
    "restore_kv_caches",
    "unregister_kv_caches",
}

Function = ast.FunctionDef


def base_files() -> dict[str, Path]:
    files = {}
    folder = os.environ.get("KVLANE_CONTRACT_BASES")
    if folder:
        files = {path.stem: path for path in sorted(Path(folder).glob("base-*.py"))}
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.submodule_search_locations:
        files["installed"] = Path(spec.submodule_search_locations[0]) / BASE_PATH
    return files


BASES = base_files()


def classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def methods(node: ast.ClassDef) -> dict[str, Function]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def decorators(method: Function) -> set[str]:
    return {ast.unparse(each).split("(")[0] for each in method.decorator_list}


def base_methods(path: Path) -> dict[str, Function]:
    found = classes(path)
    return methods(found["SupportsHMA"]) | methods(found["KVConnectorBase_V1"])


OURS = methods(classes(CONNECTOR)["KVLaneConnector"])


def complaints(ours: Function, base: Function) -> list[str]:
    """Why vLLM could not call `ours` as it calls `base`."""
    kinds = {"classmethod", "staticmethod", "property"}
    if decorators(ours) & kinds != decorators(base) & kinds:
        return [f"{ours.name} is {decorators(ours) & kinds}, the base has {decorators(base) & kinds}"]
    found = []
    mine = [each.arg for each in (*ours.args.posonlyargs, *ours.args.args)]
    theirs = [each.arg for each in (*base.args.posonlyargs, *base.args.args)]
    if mine[: len(theirs)] != theirs and ours.args.vararg is None:
        found.append(f"{ours.name}{tuple(mine)} does not take {tuple(theirs)}")
    required = len(mine) - len(ours.args.defaults)
    if required > len(theirs):
        found.append(f"{ours.name} requires {mine[len(theirs) : required]}, which vLLM does not pass")
    optional_in_base = len(theirs) - len(base.args.defaults)
    if required > optional_in_base:
        found.append(f"{ours.name} requires {mine[optional_in_base:required]}, which is optional")
    named = {each.arg for each in ours.args.kwonlyargs}
    missing = {each.arg for each in base.args.kwonlyargs} - named - set(mine)
    if missing and ours.args.kwarg is None:
        found.append(f"{ours.name} does not take {sorted(missing)}")
    if base.args.kwarg is not None and ours.args.kwarg is None:
        found.append(f"{ours.name} does not take other keywords")
    return found


def test_there_is_a_base_class_to_check_against() -> None:
    assert BASES, "neither vLLM is installed nor KVLANE_CONTRACT_BASES names a folder with base-*.py"


@pytest.mark.parametrize("path", BASES.values(), ids=BASES.keys())
def test_every_override_takes_what_the_base_takes(path: Path) -> None:
    base = base_methods(path)
    assert len(base) > 20
    found = [line for name, method in OURS.items() if name in base for line in complaints(method, base[name])]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", BASES.values(), ids=BASES.keys())
def test_every_abstract_method_is_there(path: Path) -> None:
    base = base_methods(path)
    abstract = {name for name, method in base.items() if "abstractmethod" in decorators(method)}
    assert len(abstract) >= 7
    assert abstract <= set(OURS)


@pytest.mark.parametrize("path", BASES.values(), ids=BASES.keys())
def test_every_public_method_is_one_that_vllm_calls(path: Path) -> None:
    public = {name for name in OURS if not name.startswith("_")}
    assert public - set(base_methods(path)) <= NOT_EVERYWHERE


def test_the_comparison_sees_a_missing_parameter() -> None:
    def method(text: str) -> Function:
        (node,) = ast.parse(text).body
        assert isinstance(node, ast.FunctionDef)
        return node

    base = method("def f(self, a, b=1, *, c=2, **kwargs): ...")
    assert complaints(method("def f(self, a, b=1, *, c=2, **kwargs): ..."), base) == []
    assert complaints(method("def f(self, a, b=1, d=3, **kwargs): ..."), base) == []
    for wrong in (
        "def f(self, a, **kwargs): ...",
        "def f(self, b, a=1, **kwargs): ...",
        "def f(self, a, b, **kwargs): ...",
        "def f(self, a, b, d, **kwargs): ...",
        "def f(self, a, b=1): ...",
        "@classmethod\ndef f(self, a, b=1, **kwargs): ...",
    ):
        assert complaints(method(wrong), base), wrong
