"""Check the rules of the house in its source: imports between rooms, docstrings of what users call, private names."""

import ast
import functools
import inspect
import re
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
    "watch": "",
    "attached": "",
    "families": "layout",
    "versions": "families",
    "ops": "config families layout machine versions watch",
    "backends": "config families layout machine ops",
    "engine": "backends config families layout machine ops versions watch",
    "graphs": "backends config engine layout machine ops watch",
    "options": "config engine graphs layout machine ops watch",
    "decoding": "attached backends graphs machine ops versions watch",
    "tower": "attached backends config engine families graphs layout machine ops options versions watch",
    "model": "attached families machine tower versions watch",
    "status": "backends config decoding families graphs machine model ops options tower versions",
    "api": "backends config decoding families layout machine model status tower",
    "calibration": "api backends config status tower",
    "__init__": "api backends calibration config decoding machine model options status tower",
    "tools": "__init__ api backends config families layout machine tower versions",
    "__main__": "tools",
}
"""The rooms, and which rooms above it each of them imports."""


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def room_of(path: Path) -> str:
    """Return the room that a file belongs to: its folder or its own name below the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_room(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


def imported_rooms(path: Path) -> set[str]:
    """Return the rooms that a file imports, anywhere in it."""
    modules: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "hf_vit_accel":
                modules += [f"hf_vit_accel.{alias.name}" for alias in node.names if is_room(alias.name)]
            else:
                modules.append(node.module or "")
    rooms = set()
    for module in modules:
        package, *names = module.split(".")
        if package == "hf_vit_accel":
            rooms.add(names[0] if names else "__init__")
    return rooms


@pytest.mark.parametrize("room", IMPORTS)
def test_a_room_imports_only_rooms_above_it(room: str) -> None:
    imports = set()
    for path in FILES:
        if room_of(path) == room:
            imports |= imported_rooms(path)
    imports.discard(room)
    assert imports == set(IMPORTS[room].split())
    above = list(IMPORTS)[: list(IMPORTS).index(room)]
    assert imports <= set(above)


def test_every_file_is_in_a_room() -> None:
    assert {room_of(path) for path in FILES} == set(IMPORTS)


def test_files_are_documented() -> None:
    for path in FILES:
        assert ast.get_docstring(nodes_of(path)[0]), f"{path} needs a docstring"  # type: ignore[arg-type]
        assert path.name != "utils.py"


def test_what_users_call_is_documented_field_by_field() -> None:
    for name in hf_vit_accel.__all__:
        value = getattr(hf_vit_accel, name)
        if not callable(value):
            continue
        docstring = inspect.getdoc(value) or ""
        assert docstring, name
        if inspect.isfunction(value) and inspect.signature(value).parameters:
            assert "Args:" in docstring, name


def test_the_bench_of_the_package_is_one_screen() -> None:
    """What measures us stands in `benchmarks/`."""
    assert len((PACKAGE / "tools" / "bench.py").read_text().splitlines()) <= 470


def test_the_files_of_make_quick_are_there() -> None:
    [words] = re.findall(r"^QUICK := (.*)$", (TESTS.parent / "Makefile").read_text(), re.MULTILINE)
    assert all((TESTS.parent / f"tests/unit/test_{word}.py").is_file() for word in words.split())
