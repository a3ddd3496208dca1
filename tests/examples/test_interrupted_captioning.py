"""Caption good and bad files of every kind with `examples/captioner/main.py`; kill runs and resume them."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from captioner import main as batch_caption
from captioner.files import lock
from captioner.journal import Journal
from programs import EXAMPLES, RUNNER, draw, launched
from support.towers import alike
from support_examples import ALL, BAD, GOOD, KINDS, BackgroundRun, Inputs, options_of, write_inputs

MergedRecords = list[dict[str, Any]]
"""The lines of a merged file."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def merge(output: Path, result: Path) -> MergedRecords:
    """Merge the records of a run into a file of JSON lines, and read it."""
    done = RUNNER.invoke(batch_caption.app, ["merge", str(output), str(result)])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in result.read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.fixture(scope="module")
def uninterrupted(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> MergedRecords:
    """Return the merged records of one process that nobody interrupted."""
    output = tmp_path_factory.mktemp("uninterrupted") / "new" / "captions"
    done = RUNNER.invoke(batch_caption.app, options_of(inputs, output, **{"batch-size": 16}))
    assert done.exit_code == 0, done.output
    stdout = done.stdout
    assert f"{ALL} items, {ALL} of them to caption" in stdout and f"{ALL} of {ALL} items in" in stdout
    assert f"{GOOD} of {ALL} records have captions" in stdout and f"{BAD} records failed" in stdout
    assert "model.visual: qwen3_vl, patched" in stdout and "vision tokens/s" in stdout
    (entry,) = json.loads((output / "manifest.json").read_text())["runs"]
    assert (
        entry["records_by_prompt"] == {"describe this {kind} .": ALL}
        and entry["processes"] == 1
        and entry["device"] == "cpu"
    )
    assert entry["prompts"] == ["describe this {kind} ."] and entry["inputs"] == inputs.arguments
    assert entry["settings"]["max_new_tokens"] == 24 and entry["settings"]["dtype"] == "float32"
    assert entry["versions"].keys() == {"torch", "transformers", "accelerate", "hf_vit_accel", "python"}
    assert "patched" in entry["status"] and "T" in entry["begun"]
    return merge(output, output.parent / "merged.jsonl")


def test_good_files_have_the_right_captions(inputs: Inputs, uninterrupted: MergedRecords) -> None:
    good = {record["key"]: record for record in uninterrupted if record["status"] == "ok"}
    assert good.keys() == inputs.captions.keys()
    wrong = {key: record["caption"] for key, record in good.items() if record["caption"] != inputs.captions[key]}
    assert len(wrong) <= 0.1 * len(good), wrong
    by_length = sorted(KINDS, key=len)
    wrong_kinds = Counter(next((kind for kind in by_length if key.endswith(kind)), "row") for key in wrong)
    assert max(wrong_kinds.values(), default=0) <= 1, wrong_kinds  # more would mean that a kind is read wrongly
    sizes = {draw(seed)[0].size for seed in range(GOOD)}
    assert {(record["width"], record["height"]) for record in good.values()} == sizes
    assert all(record["tokens"] and record["error"] is None for record in good.values())


def test_bad_files_have_reasons(inputs: Inputs, uninterrupted: MergedRecords) -> None:
    bad = {record["key"]: record for record in uninterrupted if record["status"] == "error"}
    assert bad.keys() == inputs.errors.keys()
    other_errors = {key: bad[key] for key, error in inputs.errors.items() if not re.search(error, bad[key]["error"])}
    assert not other_errors
    assert all(record["caption"] is None for record in bad.values())


def test_a_process_without_a_share_ends_well(tmp_path: Path) -> None:
    """One picture for two processes: the other one ends before there is a record."""
    draw(0)[0].save(tmp_path / "0.png")
    inputs = Inputs([str(tmp_path / "0.png")], {}, {})
    for count in (1, 0):
        printed = launched(batch_caption.app, options_of(inputs, tmp_path / "captions"), tmp_path)
        assert f"1 items, {count} of them to caption" in printed and "1 of 1 records have captions" in printed


@pytest.fixture
def runs() -> Iterator[list[BackgroundRun]]:
    """Hold the runs of a test, and kill those that are left after it."""
    started: list[BackgroundRun] = []
    yield started
    for run in started:
        if run.process.is_running():
            run.kill()


@pytest.mark.parametrize("way", alike("forked", "accelerate launch"))
def test_runs_that_hang_and_are_killed_give_the_same_records(
    inputs: Inputs, uninterrupted: MergedRecords, tmp_path: Path, runs: list[BackgroundRun], way: str
) -> None:
    """First run two processes of which one hangs, then one process if runs are launched; kill them; then finish."""
    output = tmp_path / "captions"
    chance = random.Random()
    sizes = (2,) if way == "forked" else (2, 1)
    for number, processes in enumerate(sizes, start=1):
        run = BackgroundRun(inputs, output, processes, way)
        runs.append(run)
        # Another process may write records before the first one has noted the run.
        run.wait_for(lambda count=number: len(Journal(output).manifest()["runs"]) == count, "the run is noted")
        if processes == 2:
            check_that_the_other_process_goes_on(run, inputs, way)
        else:
            run.wait_for_records(chance.randint(1, 11))
            time.sleep(chance.uniform(0, 0.3))
        run.kill()
        with lock(output, alone=True):  # the lock is free
            pass
        assert run.count() < ALL
        # A power cut often leaves half a line and half a file; a kill seldom does.
        with chance.choice(Journal(output).shards()).open("ab") as shard:
            shard.write(b'{"key": "torn \xc3')
        (output / f".manifest.json.{processes}").write_text('{"runs": [{"run"')
    written = {(record.key, record.prompt) for record in Journal(output).records()}
    stdout = launched(batch_caption.app, options_of(inputs, output), tmp_path)
    assert f"{ALL} items, {ALL - len(written)} of them to caption" in stdout
    assert stdout.count("of them to caption") == 1 and f"{GOOD} of {ALL} records have captions" in stdout
    assert "process 0:" in stdout and "process 1:" in stdout
    lines = Counter((record.key, record.prompt) for record in Journal(output).records())
    assert len(lines) == ALL and max(lines.values()) == 1, "no record was written twice"
    assert merge(output, tmp_path / "merged.jsonl") == uninterrupted
    assert len(json.loads((output / "manifest.json").read_text())["runs"]) == len(sizes) + 1


def check_that_the_other_process_goes_on(run: BackgroundRun, inputs: Inputs, way: str) -> None:
    """A process that hangs stops no other one, and keeps the folder locked: no second run, no incomplete merge."""
    output = run.output
    shards = [output / f"captions-00000-{rank:05d}.jsonl" for rank in range(2)]
    run.wait_for(lambda: all(shard.exists() for shard in shards), "both processes write")
    if way != "forked":
        run.worker(1).suspend()
    run.wait_for(run.first_process_is_done, "the first process does its share")
    assert run.count() < ALL
    refused = RUNNER.invoke(batch_caption.app, options_of(inputs, output))
    assert refused.exit_code == 2 and "another run is writing to" in refused.output
    missing = RUNNER.invoke(batch_caption.app, ["merge", str(output), str(output.parent / "part.jsonl")])
    assert missing.exit_code == 1 and "records are missing" in missing.output


PARENT = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, *sys.argv[1:]])
print(worker.pid, flush=True)
worker.wait()
"""
WORKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from captioner.files import end_with_launcher, lock
end_with_launcher()
with lock(Path(sys.argv[2]), alone=True):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("parent", ["launcher", "shell"])
def test_a_process_ends_with_its_launcher_and_outlives_its_shell(tmp_path: Path, parent: str) -> None:
    command = [sys.executable, "-c", PARENT, "-c", WORKER, str(EXAMPLES), str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "LOCAL_"))}
    environment |= {"LOCAL_RANK": "0"} if parent == "launcher" else {}
    started = psutil.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    worker = psutil.Process(int(started.stdout.readline()))
    try:
        assert started.stdout.readline() == "locked\n"
        started.kill()
        started.wait()
        if parent == "launcher":
            assert psutil.wait_procs([worker], timeout=10)[0], "the worker went on"
            with lock(tmp_path, alone=True):  # the lock is free
                pass
        else:
            time.sleep(0.5)
            with pytest.raises(ValueError, match="another run is writing"), lock(tmp_path, alone=True):
                pass
    finally:
        for process in (started, worker):
            with suppress(psutil.NoSuchProcess):
                process.kill()
