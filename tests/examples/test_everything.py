"""`examples/benchmark/everything.py`: what it runs, where, and what it makes of the files."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "examples" / "benchmark"


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    yield importlib.import_module("everything")
    sys.modules.pop("everything")


def test_commands_are_what_pages_can_tell(everything: Any) -> None:
    for name, job in everything.JOBS.items():
        told, run = job.told(), job.words(Path("x.json"))
        assert told.split()[0] in ("hf-vit-accel", "python", "torchrun", "accelerate"), name
        assert shlex.split(told)[1:-2] == run[-len(shlex.split(told)) + 1 : -2], name
        script = next((word for word in run if word.endswith(".py")), None)
        assert script is None or (BENCHMARK.parents[1] / script).is_file()


def test_what_is_hidden_is_not_installed(tmp_path: Path) -> None:
    """Neither for `find_spec` nor for an import; all else is, and arguments arrive."""
    (tmp_path / "seen.py").write_text(
        "import sys\n"
        "from importlib.util import find_spec\n"
        "try:\n"
        "    import typer.main\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error.name, find_spec('typer'), find_spec('numpy').name, sys.argv[1:])\n"
    )
    command = [sys.executable, str(BENCHMARK / "without.py"), "typer,flash_attn", "seen", "--rounds", "2"]
    places = os.environ | {"PYTHONPATH": str(tmp_path)}
    found = subprocess.run(command, capture_output=True, text=True, env=places, check=True).stdout
    assert found == "typer None numpy ['--rounds', '2']\n"


def test_parts_run_beside_each_other_and_make_one_file(
    everything: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "one.py"
    script.write_text(
        "import json, os, sys, time\n"
        "models, path = sys.argv[sys.argv.index('--models') + 1], sys.argv[-1]\n"
        "if models == 'broken': sys.exit(3)\n"
        "if models == 'slow': time.sleep(60)\n"
        "row = dict(model=models, gpus=os.environ['CUDA_VISIBLE_DEVICES'], at=time.time())\n"
        "time.sleep(0.5)\n"
        "open(path, 'w').write(json.dumps(dict(rows=[row | dict(over=time.time())], machine=dict(driver=models))))\n"
    )
    whole = tmp_path / "whole.py"
    whole.write_text(script.read_text().replace("sys.argv[sys.argv.index('--models') + 1]", "'all'"))
    job, kept = everything.Job, tmp_path / "kept.json"
    jobs = {
        "some": job(file="some.json", command=f"python {script}", models=("a", "b", "c"), option="--models"),
        "all": job(file="all.json", command=f"python {whole}", gpus=0),
        "kept": job(file="kept.json", command=f"python {script}", models=("a", "broken"), option="--models"),
        "slow": job(file="slow.json", command=f"python {script}", models=("slow",), option="--models"),
    }
    monkeypatch.setattr(everything, "JOBS", jobs)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    kept.write_text("as it was")
    begin = time.monotonic()
    with pytest.raises(everything.typer.Exit):
        everything.main(only="some,all,kept,slow", output=tmp_path, gpus=2, limit=3, commit="abc", commands=False)
    assert time.monotonic() - begin < 30
    some = json.loads((tmp_path / "some.json").read_text())
    assert [row["model"] for row in some["rows"]] == ["a", "b", "c"] and some["commit"] == "abc"
    assert {row["gpus"] for row in some["rows"]} <= {"5", "7"}
    assert some["machines"] == [{"driver": "a"}, {"driver": "b"}, {"driver": "c"}]
    (row,) = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert row["gpus"] == "5,7" and row["at"] > max(each["over"] for each in some["rows"]), (
        "alone, when others are over"
    )
    assert kept.read_text() == "as it was" and not (tmp_path / "slow.json").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_that_is_stopped_leaves_what_was_done(
    everything: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was begun: processes run in the folder of the project."""
    script = tmp_path / "one.py"
    script.write_text("import json, sys\njson.dump(dict(device='d', rows=[]), open(sys.argv[-1], 'w'))\n")
    job = everything.Job(file="some.json", command=f"python {script}", models=("a", "b"), option="--models")
    monkeypatch.setattr(everything, "JOBS", {"some": job, "all": everything.replace(job, file="all.json", gpus=0)})
    run = everything.run

    def stopped(part: Any, *rest: Any) -> Any:
        if part.gpus == 0:
            raise KeyboardInterrupt
        return run(part, *rest)

    monkeypatch.setattr(everything, "run", stopped)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        everything.main(only="all,some", output=Path("build"), gpus=2, limit=9, commit="abc", commands=False)
    assert json.loads((tmp_path / "build" / "some.json").read_text())["commit"] == "abc"
    assert not (tmp_path / "build" / "all.json").exists()
    script.write_text("")  # ends well, and makes nothing
    with pytest.raises(everything.typer.Exit):
        everything.main(only="some", output=tmp_path, gpus=2, limit=9, commit="abc", commands=False)
