"""`examples/captioner/on_ray.py`: every record once, whatever is repeated, dies or is dropped; Ray itself last."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from captioner import stages
from captioner.batches import Task
from captioner.items import checksum
from captioner.journal import Journal, Record
from click.testing import Result
from programs import EXAMPLES, RUNNER, encode, words
from read_once import read_once
from support.towers import alike
from support_captioning import (
    FIRST,
    KINDS,
    MODEL,
    PROMPT,
    SECOND,
    WORDS,
    caption,
    counted,
    lines,
    start_anew,
)

pytest.importorskip("pyarrow")
ROOT = EXAMPLES.parent


Schedule = Callable[[Sequence[int]], list[int]]
"""From the numbers of all batches to those to caption, in order; a number may come twice."""


class NoCluster:
    """Stand in for Ray: run the stages here, as `schedule` says, and raise `error` at the end."""

    def __init__(self) -> None:
        self.schedule: Schedule = list
        self.error: BaseException | None = None

    def captioned(
        self, job: stages.Job, batches: Sequence[Sequence[Task]], most_actors: int | None
    ) -> Iterator[dict[str, Any]]:
        job = pickle.loads(pickle.dumps(job))
        actors = [stages.Answer(job) for _ in range(2)]
        yielded = set()
        for turn, number in enumerate(self.schedule(range(len(batches)))):
            counts = actors[turn % 2](stages.make_ready(job, pickle.loads(pickle.dumps(batches[number]))))
            if number not in yielded:  # Ray yields a batch once
                yielded.add(number)
                reported = {name: counts[name] for name in ("failed", "vision", "text", "halved")}
                yield {"number": number, "status": actors[0].status(), **reported}
        for actor in actors:
            actor.stack.close()
        if self.error:
            raise self.error


class RayError(Exception):
    """Stand in for Ray's own error."""


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> NoCluster:
    """Import `captioner/on_ray.py` without Ray, as the module `on_ray`."""
    cluster = NoCluster()
    parts = {"captioned": cluster.captioned, "connect": lambda options: False, "measured": stages.measure}
    exceptions = SimpleNamespace(RayError=RayError, ExecutionTimeoutError=RayError)
    monkeypatch.setitem(sys.modules, "captioner.cluster", SimpleNamespace(**parts))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(exceptions=exceptions))
    monkeypatch.setitem(sys.modules, "ray.data.exceptions", exceptions)
    monkeypatch.delitem(sys.modules, "captioner.on_ray", raising=False)
    read_once(monkeypatch)
    monkeypatch.setitem(sys.modules, "on_ray", importlib.import_module("captioner.on_ray"))
    return cluster


def on_ray(inputs: Sequence[str], output: Path, *options: str) -> Result:
    """Run `captioner/on_ray.py`."""
    settings = [f"--model={MODEL}", f"--max-new-tokens={WORDS}", "--batch-size=4"]
    arguments = [*inputs, f"--output={output}", *settings, *options]
    return RUNNER.invoke(sys.modules["on_ray"].app, [*arguments, f"--prompt={PROMPT}"])


def test_without_ray_the_program_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\")")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    program = [sys.executable, EXAMPLES / "captioner" / "on_ray.py", "--help"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "This program needs Ray Data (No module named 'ray'): pip install 'ray[data]'\n"


def test_records_are_those_of_one_process(
    no_cluster: NoCluster, mixed_inputs: list[str], alone: Counter[Record], tmp_path: Path
) -> None:
    done = on_ray(mixed_inputs, tmp_path)
    assert done.exit_code == 0, done.output
    assert counted(tmp_path) == alone and set(alone.values()) == {1} and len(alone) == 16
    assert sorted(path.name for path in tmp_path.glob("captions-*")) == ["captions-00000.jsonl", "captions-00001.jsonl"]
    (entry,) = Journal(tmp_path).manifest()["runs"]
    assert "qwen3_vl, patched" in entry["status"] and entry["records"] == 16
    assert "16 of 16 items" in done.output and "14 of 16 records have captions" in done.output
    assert "0 of them to caption" in on_ray(mixed_inputs, tmp_path).output
    assert "0 of them to caption" in caption(mixed_inputs, tmp_path).output
    assert counted(tmp_path) == alone


@pytest.mark.parametrize("seed", alike(0, 1))
def test_batches_that_are_done_twice_are_there_once(
    no_cluster: NoCluster, mixed_inputs: list[str], alone: Counter[Record], tmp_path: Path, seed: int
) -> None:
    """An actor may die between writing its batch and reporting it. A node that seemed dead may write once more."""
    chance = random.Random(seed)
    no_cluster.schedule = lambda numbers: chance.sample([*numbers] * 2, 2 * len(numbers))
    assert on_ray(mixed_inputs, tmp_path).exit_code == 0
    assert counted(tmp_path) == alone


def test_options_that_change_captions_reach_the_workers(
    no_cluster: NoCluster, mixed_inputs: list[str], alone: Counter[Record], tmp_path: Path
) -> None:
    options = [
        "--temperature=0.8",
        "--seed=3",
        "--max-pixels=20000",
        "--refuse-above=32000",
        "--prompt=what is {stem} ?",
    ]
    assert caption(mixed_inputs, tmp_path / "one", "--batch-size=4", *options).exit_code == 0
    assert on_ray(mixed_inputs, tmp_path / "ray", *options).exit_code == 0
    assert counted(tmp_path / "ray") == counted(tmp_path / "one")
    errors = [result.error or "" for result in counted(tmp_path / "ray")]
    assert (
        any("the limit is 32000" in error for error in errors) and not counted(tmp_path / "ray").keys() & alone.keys()
    )


def test_workers_stand_in_other_folders(
    no_cluster: NoCluster,
    mixed_inputs: list[str],
    alone: Counter[Record],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def elsewhere(numbers: Sequence[int]) -> list[int]:
        os.chdir(tmp_path)
        return list(numbers)

    monkeypatch.chdir(Path(mixed_inputs[0]).parent)
    no_cluster.schedule = elsewhere
    inputs = ["photos/**/*.png", "b.tar", "c.parquet"]
    assert on_ray(inputs, Path(os.path.relpath(tmp_path / "out"))).exit_code == 0
    assert counted(tmp_path / "out") == alone


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        *alike((RayError("two of three nodes are gone"), "one"), (RayError("two of three nodes are gone"), "ray")),
        *alike((KeyboardInterrupt(), "ray"), (KeyboardInterrupt(), "one")),
        *alike((OSError("disk full"), "ray"), (OSError("disk full"), "one"))[1:],
    ],
)
def test_either_goes_on_where_ray_stopped(
    no_cluster: NoCluster,
    mixed_inputs: list[str],
    alone: Counter[Record],
    tmp_path: Path,
    error: BaseException,
    goes_on: str,
) -> None:
    no_cluster.schedule = lambda numbers: [2, 0, 2]
    no_cluster.error = error
    stopped = on_ray(mixed_inputs, tmp_path)
    assert stopped.exit_code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert "start the same command to go on" in stopped.output and str(error) in stopped.output
    half = counted(tmp_path)
    assert len(half) == 8 and half < alone
    no_cluster.schedule = list
    no_cluster.error = None
    done = on_ray(mixed_inputs, tmp_path) if goes_on == "ray" else caption(mixed_inputs, tmp_path)
    assert done.exit_code == 0 and "16 items, 8 of them to caption" in done.output
    assert counted(tmp_path) == alone


def test_overwrite_that_is_stopped_says_how_to_go_on(
    no_cluster: NoCluster, mixed_inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the new run is noted, a start without --overwrite would go on with the old run."""
    assert on_ray(mixed_inputs, tmp_path).exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["on_ray"], "processor_for", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert "start the same command to go on" in on_ray(mixed_inputs, tmp_path, "--overwrite").output
    no_cluster.error = KeyboardInterrupt()
    assert "start the same command without --overwrite to go on" in on_ray(mixed_inputs, tmp_path, "--overwrite").output


def test_ray_goes_on_where_one_stopped(
    no_cluster: NoCluster, mixed_inputs: list[str], alone: Counter[Record], tmp_path: Path
) -> None:
    caption(mixed_inputs, tmp_path, "--limit=7")
    assert "16 items, 9 of them to caption" in on_ray(mixed_inputs, tmp_path, "--dry-run").output
    assert len(counted(tmp_path)) == 7
    assert on_ray(mixed_inputs, tmp_path).exit_code == 0 and counted(tmp_path) == alone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first, then", alike(("ray", "one"), ("one", "ray")))
def test_both_programs_identify_pictures_by_their_bytes(
    no_cluster: NoCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, first: str, then: str
) -> None:
    def run(program: str, output: Path) -> str:
        start_anew()
        done = on_ray([place], output) if program == "ray" else caption([place], output)
        assert done.exit_code == 0, done.output
        return words(done)

    read_once(monkeypatch)
    output = tmp_path / "out"
    place = KINDS[kind](tmp_path, FIRST)
    run(first, output)
    (old,) = counted(output)
    assert old.caption and old.checksum == checksum(BytesIO(encode(FIRST, "BMP")))
    assert (old.stamp is None) == (kind == "row that names a file")
    os.utime(place, (1, 1))
    assert "1 items, 0 of them to caption" in run(then, output)
    assert not (output / "superseded.jsonl").exists()
    if old.stamp:
        assert counted(output) == {replace(old, stamp=stamp_at_1(place, old)): 1}
        with monkeypatch.context() as patch:
            patch.setattr("captioner.plan.checksum", lambda file: pytest.fail("read again"))
            run(first, output)
    KINDS[kind](tmp_path, SECOND)
    printed = run(then, output)
    assert "1 items, 1 of them to caption" in printed and "1 captions are outdated" in printed
    (now,) = counted(output).elements()
    assert now.caption != old.caption and now.checksum == checksum(BytesIO(encode(SECOND, "BMP")))
    assert [line["caption"] for line in lines(output / "superseded.jsonl")] == [old.caption]
    run(first, tmp_path / "fresh")
    assert counted(tmp_path / "fresh") == {now: 1}
    assert "1 items, 0 of them to caption" in run(first, output)


def stamp_at_1(place: str, former: Record) -> str:
    """Return the stamp of a record after its file's time was set to 1 second after the epoch."""
    before = str(former.stamp).split(" ")
    return " ".join([str(Path(place).stat().st_size), "1000000000", *before[2:]])


def test_batches_that_ray_gave_up_are_reported_and_captioned_later(
    no_cluster: NoCluster, mixed_inputs: list[str], alone: Counter[Record], tmp_path: Path
) -> None:
    no_cluster.schedule = lambda numbers: list(numbers)[1:]
    done = on_ray(mixed_inputs, tmp_path)
    assert done.exit_code == 1 and "4 records are missing: wait for the run, or start it once more" in done.output
    no_cluster.schedule = list
    assert on_ray(mixed_inputs, tmp_path).exit_code == 0 and counted(tmp_path) == alone


@pytest.mark.parametrize(
    "options, why",
    [
        (["--model=nowhere"], "cannot load nowhere"),
        (["--demo"], "name --model or --demo, not both"),
        (["--min-pixels=100000", "--max-pixels=1000"], "Invalid value for --min-pixels: --min-pixels 100000 is above"),
    ],
)
def test_mistakes_are_refused(
    no_cluster: NoCluster, mixed_inputs: list[str], tmp_path: Path, options: list[str], why: str
) -> None:
    done = on_ray(mixed_inputs, tmp_path, *options)
    assert done.exit_code == 2 and why in " ".join(done.output.replace("│", " ").split())


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[data]'")
def test_a_small_soak_on_three_nodes(tmp_path: Path) -> None:
    """A node is killed with all its processes, and another one joins."""
    command = [
        sys.executable,
        str(ROOT / "tests" / "examples" / "captioning" / "soak_on_ray.py"),
        str(tmp_path),
        "--pictures=60",
        "--kills=1",
    ]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=600)
    figures = json.loads(completed.stdout)
    assert not figures["problems"] and figures["killed"] == {"node": 1} and completed.returncode == 0, figures
