"""The commands of `benchmarks/everything.py` are those that are shown, and every program can be imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import pytest
from programs import EXAMPLES

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    yield importlib.import_module("everything")
    sys.modules.pop("everything")


def test_every_shown_command_is_the_one_that_runs(everything: ModuleType) -> None:
    for name, job in everything.JOBS.items():
        shown = shlex.split(job.command_line())
        arguments = job.arguments(Path("x.json"))
        assert shown[0] in ("hf-vit-accel", "python", "torchrun"), name
        assert shown[1:-2] == arguments[-len(shown) + 1 : -2], name
        scripts = [word for word in arguments if word.endswith(".py")]
        assert all((BENCHMARK.parent / script).is_file() for script in scripts)


LACKING = [
    program
    for program, package in {"liger": "liger_kernel", "quantised": "bitsandbytes"}.items()
    if importlib.util.find_spec(package) is None
]


def import_all(folder: Path, programs: list[Path]) -> None:
    """Import programs of a folder. Modules of the two folders have equal names, so those of the other one go first."""
    folders = (str(BENCHMARK), str(EXAMPLES))
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(folders):
            del sys.modules[name]
    sys.path[:] = [str(folder), *(path for path in sys.path if not path.startswith(folders))]
    for program in programs:
        runpy.run_path(str(program), run_name="program")


@pytest.mark.parametrize("folder", [BENCHMARK, EXAMPLES], ids=lambda path: path.name)
def test_every_program_can_be_imported(folder: Path) -> None:
    """Most of them need a GPU, so that no other test here would notice a renamed import."""
    programs = [path for path in sorted(folder.glob("*.py")) if path.stem not in LACKING]
    assert len(programs) > 5
    process = get_context("fork").Process(target=import_all, args=(folder, programs))
    process.start()
    process.join()
    assert process.exitcode == 0, "its traceback stands above"


def test_without_hides_packages_from_imports_and_find_spec(tmp_path: Path) -> None:
    """Other packages are visible, and the module gets its arguments."""
    (tmp_path / "seen.py").write_text(
        "import sys\n"
        "from importlib.util import find_spec\n"
        "try:\n"
        "    import typer.main\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error.name, find_spec('typer'), find_spec('numpy').name, sys.argv[1:])\n"
    )
    command = [sys.executable, str(BENCHMARK / "without.py"), "typer,flash_attn", "seen", "--rounds", "2"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    output = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert output == "typer None numpy ['--rounds', '2']\n"
