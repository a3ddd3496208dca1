"""The house rules, read from the source: who imports whom, how long files are, what stays optional."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hf_vit_accel

PACKAGE = Path(hf_vit_accel.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = Path(__file__).parents[1]

IMPORTS = {
    "config": "",
    "layout": "",
    "machine": "",
    "families": "layout",
    "ops": "families layout machine",
    "backends": "layout machine ops",
    "engine": "backends config families layout machine ops",
    "graphs": "config engine layout machine ops",
    "sharing": "config engine layout machine ops",
    "tower": "backends config engine families graphs layout machine ops sharing",
    "status": "backends config engine families graphs ops sharing tower",
    "api": "backends config families layout machine ops sharing status tower",
    "calibration": "api backends config ops status tower",
    "__init__": "api backends calibration config machine sharing status tower",
    "tools": "__init__ api backends config engine families graphs layout machine ops tower",
    "__main__": "tools",
}
"""What each room imports: only rooms above it."""

# Explained in the class that they come from: a backend, an autograd.Function.
OVERRIDES = {"plan", "attend", "prepare", "lacks", "close", "graph_bounds", "needs_on", "attend_layers"}
OVERRIDES |= {"reasons_against", "reasons_against_layout", "why_not_worth", "forward", "backward"}


def level(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The levels that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == "hf_vit_accel":
                names = [f"hf_vit_accel.{alias.name}" for alias in node.names if level_exists(alias.name)]
        for name in names:
            if name.split(".")[0] == "hf_vit_accel":
                found.add(name.split(".")[1] if "." in name else "__init__")
    return found


def level_exists(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


@pytest.mark.parametrize("place", IMPORTS)
def test_levels_are_kept(place: str) -> None:
    found = set().union(*(imported(path) for path in FILES if level(path) == place)) - {place}
    assert found == set(IMPORTS[place].split())
    above = list(IMPORTS)[: list(IMPORTS).index(place)]
    assert found <= set(above)


def test_every_file_has_a_place() -> None:
    assert set(map(level, FILES)) == set(IMPORTS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_short_and_explained(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(source)), "every file says what it holds"
    assert path.name != "utils.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_public_functions_are_explained(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            overrides = isinstance(node, ast.FunctionDef) and node.name in OVERRIDES
            nested = isinstance(node, ast.FunctionDef) and node.col_offset > 4
            inside = any(each.lineno < node.lineno <= (each.end_lineno or 0) for each in functions)
            assert overrides or nested or inside or ast.get_docstring(node), f"{path}: {node.name}"


def private_names(path: Path) -> set[str]:
    """Names with a leading underscore that a file defines: functions, classes, variables, attributes of `self`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr if of_self(node) else "")
    return {name for name in found if name.startswith("_") and not name.startswith("__") and name != "_"}


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def used_of_others(path: Path) -> set[str]:
    """Attributes of anything but `self`, names that are imported, and those that `setattr` and its like are given."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and not of_self(node):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
            found |= {text.rpartition(".")[2] for text in texts if isinstance(text, str)}
    return found


def test_private_names_are_used_by_unit_tests_alone() -> None:
    ours = set().union(*map(private_names, FILES))
    others = [path for path in TESTS.rglob("*.py") if TESTS / "unit" not in path.parents]
    assert {"_graphs", "_prefill_module", "_FAILURES", "_PROOFS"} <= ours and len(others) > 20
    used = {str(path.relative_to(TESTS)): used_of_others(path) & ours for path in others}
    assert not {path: names for path, names in used.items() if names}
