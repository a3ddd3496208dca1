"""Test `benchmarks/everything.py`: its commands, where its processes run, and the files that it writes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from programs import start_forked

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = """
import json, os, sys, time
models = sys.argv[sys.argv.index('--models') + 1] if '--models' in sys.argv else 'all'
path = sys.argv[-1]
if models == 'broken':
    sys.exit(3)
if models == 'slow':
    time.sleep(60)
row = dict(model=models, gpus=os.environ['CUDA_VISIBLE_DEVICES'], begin=time.time())
row['cores'] = list(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []
time.sleep(0.5)
row['end'] = time.time()
with open(path, 'w') as file:
    json.dump(dict(rows=[row], machine=dict(driver=models)), file)
"""
"""A benchmark that writes its GPUs, cores and times; the model decides whether it fails."""


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
PROGRAMS = [path for folder in (BENCHMARK, BENCHMARK.parent / "examples") for path in sorted(folder.glob("*.py"))]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_can_be_imported(program: Path, tmp_path: Path) -> None:
    """Most of them need a GPU, so that no other test here would notice a renamed import."""
    if program.stem in LACKING:
        pytest.skip("it needs a package that is not installed")
    start_forked(program, tmp_path, run_name="program")


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


def test_parts_run_beside_each_other_and_make_one_file(
    everything: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def job(file: str, models: tuple[str, ...], gpus: int = 1) -> object:
        command = f"python {script}"
        return everything.Job(file=file, command=command, models=models, option="--models", gpus=gpus)

    jobs = {
        "three": job("three.json", ("a", "b", "c")),
        "all_gpus": job("all_gpus.json", (), gpus=0),
        "broken": job("broken.json", ("a", "broken")),
        "slow": job("slow.json", ("slow",)),
    }
    monkeypatch.setattr(everything, "JOBS", jobs)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    earlier_file = tmp_path / "broken.json"
    earlier_file.write_text("as it was")
    begin = time.monotonic()
    with pytest.raises(everything.typer.Exit):
        everything.main(only=",".join(jobs), output=tmp_path, gpus=2, limit=4, commit="abc", commands=False)
    assert time.monotonic() - begin < 30
    three = json.loads((tmp_path / "three.json").read_text())
    assert [row["model"] for row in three["rows"]] == ["a", "b", "c"] and three["commit"] == "abc"
    assert {row["gpus"] for row in three["rows"]} <= {"5", "7"}
    assert three["machines"] == [{"driver": "a"}, {"driver": "b"}, {"driver": "c"}]
    (row,) = json.loads((tmp_path / "all_gpus.json").read_text())["rows"]
    assert row["gpus"] == "5,7"
    cores = {row_of_one["gpus"]: set(row_of_one["cores"]) for row_of_one in three["rows"]}
    if len(row["cores"]) > 1 and len(cores) > 1:
        assert not set.intersection(*cores.values()), "parts share no core"
    assert row["begin"] > max(row_of_one["end"] for row_of_one in three["rows"]), "it runs alone, after the others"
    assert earlier_file.read_text() == "as it was" and not (tmp_path / "slow.json").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_that_is_stopped_keeps_the_finished_files(
    everything: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the files may be relative, although processes run in the folder of the project."""
    script = tmp_path / "script.py"
    script.write_text("import json, sys\njson.dump(dict(device='d', rows=[]), open(sys.argv[-1], 'w'))\n")
    job = everything.Job(file="two.json", command=f"python {script}", models=("a", "b"), option="--models")
    on_all_gpus = everything.replace(job, file="all_gpus.json", gpus=0)
    monkeypatch.setattr(everything, "JOBS", {"two": job, "all_gpus": on_all_gpus})
    run = everything.run

    def stopped(part: Any, *arguments: object) -> object:
        if part.gpus == 0:
            raise KeyboardInterrupt
        return run(part, *arguments)

    monkeypatch.setattr(everything, "run", stopped)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        everything.main(only="all_gpus,two", output=Path("build"), gpus=2, limit=9, commit="abc", commands=False)
    assert json.loads((tmp_path / "build" / "two.json").read_text())["commit"] == "abc"
    assert not (tmp_path / "build" / "all_gpus.json").exists()
    script.write_text("")  # ends without an error and without a file
    with pytest.raises(everything.typer.Exit):
        everything.main(only="two", output=tmp_path, gpus=2, limit=9, commit="abc", commands=False)
