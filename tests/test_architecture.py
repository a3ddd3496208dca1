"""The house rules, read from the source: who imports whom, how long files are, what stays optional."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hf_vit_accel

PACKAGE = Path(hf_vit_accel.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

MAY_IMPORT = {
    "env": set(),
    "ops": {"env", ""},
    "metadata": set(),
    "contract": set(),
    "structure": {"contract"},
    "scales": {"ops"},
    "backends": {"metadata", "ops", "scales", "env"},
    "planning": {"metadata", "backends", "faults", "ops"},
    "fusion": {"contract", "ops", "structure"},
    "encoder": {"backends", "fusion", "ops", "planning"},
    "config": set(),
    "graphs": {"backends", "config", "metadata", "planning"},
    "faults": {"backends", ""},
    "boundary": {"backends", "config", "contract", "faults", "fusion", "metadata", "planning", "scales"},
    "state": {
        "backends",
        "boundary",
        "faults",
        "fusion",
        "graphs",
        "metadata",
        "planning",
        "scales",
        "structure",
    },
    "tower": {
        "backends",
        "boundary",
        "contract",
        "encoder",
        "faults",
        "fusion",
        "graphs",
        "metadata",
        "planning",
        "state",
        "structure",
    },
    "families": {"tower", "metadata"},
    "registration": {"boundary", "families", "metadata", "backends", "planning", "tower"},
    "api": {
        "boundary",
        "config",
        "contract",
        "graphs",
        "ops",
        "registration",
        "scales",
        "families",
        "tower",
        "fusion",
        "structure",
        "backends",
        "metadata",
        "env",
    },
    "calibration": {"api", "backends", "config", "scales", "tower"},
    "doctor": {"backends", "metadata", "env", ""},
    "bench": {"api", "boundary", "backends", "config", "env", "graphs", "families", "metadata", "planning", "tower"},
    "cli": {"doctor", "bench", ""},
    "__main__": {"cli"},
    "__init__": {"api", "backends", "calibration", "config", "registration", "tower"},
}


# Explained in the class that they come from.
OVERRIDES = {"plan", "attend", "prepare", "probe", "close", "graph_bounds", "needs_on", "reasons_against", "attend_layers"}


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
                found.add(name.split(".")[1] if "." in name else "")
    return found


def level_exists(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_levels_are_kept(path: Path) -> None:
    own = level(path)
    assert imported(path) - {own} <= MAY_IMPORT[own]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_short_and_explained(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(source)), "every file says what it holds"
    assert path.name != "utils.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_public_functions_are_explained(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            overrides = isinstance(node, ast.FunctionDef) and node.name in OVERRIDES
            nested = isinstance(node, ast.FunctionDef) and node.col_offset > 4
            assert overrides or nested or inside_function(path, node) or ast.get_docstring(node), f"{path}: {node.name}"


def inside_function(path: Path, wanted: ast.AST) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.lineno < wanted.lineno <= (node.end_lineno or 0):
            return True
    return False
