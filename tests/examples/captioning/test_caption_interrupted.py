"""Caption good and bad files of every kind with `accelerate launch`, kill the run, and resume it."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from captioner import main as batch_caption
from captioner.files import lock
from captioner.journal import Journal
from PIL import Image
from programs import EXAMPLES, ROOT, draw, encode, launched, lines, png
from support_captioning import MODEL, PROMPT, call, write_tar

GOOD = 30
"""The number of good files."""
BAD = 12
ALL = GOOD + BAD
MergedRecords = list[dict[str, Any]]
"""The lines of a merged file."""


# --- files -----------------------------------------------------------------------------------------------------------


def turned(image: Image.Image) -> bytes:
    """Return a file that holds the turned image, and the orientation that turns it back."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(image.transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif, quality=95, subsampling=0)


KINDS: dict[str, Callable[[Image.Image], bytes]] = {
    "png": encode,
    "jpg": lambda image: encode(image, "JPEG", quality=95, subsampling=0),
    "webp": lambda image: encode(image, "WEBP", lossless=True),
    "gif": lambda image: encode(image.quantize(256), "GIF"),
    "palette.PNG": lambda image: encode(image.quantize(256)),
    "turned.jpeg": turned,
    "avif": lambda image: encode(image, "AVIF", quality=95),
}
"""Writes an image as a file of this kind, by the end of the file's name. `test_caption_pictures.py` reads all."""


def bad_files() -> dict[str, tuple[bytes, str]]:
    """Return the content of every bad file, and a pattern of its error, by name."""
    image = draw(0)[0]
    files = {}
    for kind in ("png", "jpg", "gif"):
        data = KINDS[kind](image)
        files[f"bad/truncated.{kind}"] = (data[: len(data) // 2], "truncated|broken|decode|decoding|not an image")
    return files | {
        "bad/bomb.png": (png(100_000, 100_000), "limit"),
        "bad/empty.jpg": (b"", "the file is empty"),
        "bad/float.tiff": (encode(Image.fromarray(np.ones((64, 64), np.float32)), "TIFF"), "floating-point"),
        "bad/html.gif": (b"<html>404 not found</html>", "not an image"),
        "bad/large.png": (encode(Image.new("1", (10_000, 10_000))), "10000 x 10000 pixels, the limit is 89478485"),
        "bad/photo.heic": (b"\0\0\0\x18ftypheic" + bytes(100), "not an image"),
        "bad/script.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not an image"),
        "bad/strip.png": (encode(Image.new("RGB", (3000, 4))), "aspect ratio"),
        "bad/video.mp4": (random.Random(1).randbytes(2000), "pip install|Invalid data"),
    }


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run: a folder, a shard and a table."""

    arguments: list[str]  # of the command line
    captions: dict[str, str]  # of every good file, by key
    errors: dict[str, str]  # a pattern for every bad file, by key


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Write 30 scenes of all kinds and the bad files into folders, a tar shard and a parquet file."""
    top = tmp_path_factory.mktemp("inputs")
    captions: dict[str, str] = {}
    errors: dict[str, str] = {}
    members: list[tuple[str, bytes]] = []
    rows: list[dict[str, bytes | None]] = []
    kinds = list(KINDS)

    def write(name: str, data: bytes) -> None:
        path = top / "scenes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    for seed in range(GOOD):
        image, caption = draw(seed)
        kind = kinds[seed % len(kinds)]
        data = KINDS[kind](image)
        name = f"{seed:03d}.{kind}"
        if seed % 5 == 4:
            members.append((name, data))
            captions[f"shard.tar/{name}"] = caption
        elif seed % 10 == 3:
            captions[f"table.parquet#{len(rows):09d}"] = caption
            rows.append({"bytes": data, "path": None})
        else:
            name = ["", "sub/", "sub/deep é\u2028/"][seed % 3] + name
            write(name, data)
            captions[f"scenes/{name}"] = caption
    for number, (name, (data, error)) in enumerate(bad_files().items()):
        if number % 5 == 0:
            members.append((name, data))
            errors[f"shard.tar/{name}"] = error
        else:
            write(name, data)
            errors[f"scenes/{name}"] = error
    write_tar(top / "shard.tar", *members)
    pq.write_table(pa.table({"image": rows}), top / "table.parquet", row_group_size=3)
    write("notes.md", b"no picture")
    assert len(captions) == GOOD and len(errors) == BAD
    return Inputs([str(top / name) for name in ("scenes", "shard.tar", "table.parquet")], captions, errors)


# --- runs ------------------------------------------------------------------------------------------------------------


def options_of(inputs: Inputs, output: Path, batch_size: int = 4) -> list[str]:
    """Return the arguments of `captioner/main.py`."""
    settings = [f"--output={output}", f"--model={MODEL}", f"--prompt={PROMPT}", "--max-new-tokens=24"]
    return ["caption", *inputs.arguments, *settings, f"--batch-size={batch_size}"]


class LaunchedRun:
    """Two processes that `accelerate launch` starts to caption the inputs. They can be killed at any moment."""

    def __init__(self, inputs: Inputs, output: Path) -> None:
        self.output = output
        # `--cpu` would start one process; `--multi_gpu` starts the number that is given, on CPUs too.
        launch = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--main_process_port=0"]
        script = [str(EXAMPLES / "captioner" / "main.py"), *options_of(inputs, output, batch_size=2)]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, "-m", "accelerate.commands.launch", *launch, *script]
        with (output.parent / "log.txt").open("ab") as log:
            self.process = psutil.Popen(command, env=environment, stdout=log, stderr=log)

    def shard(self, rank: int) -> Path:
        return self.output / f"captions-00000-{rank:05d}.jsonl"

    def count(self, rank: int) -> int:
        return self.shard(rank).read_bytes().count(b"\n") if self.shard(rank).exists() else 0

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds; `what` names it if the run ends or two minutes pass before."""
        end = time.monotonic() + 120
        while not condition():
            assert self.process.status() != psutil.STATUS_ZOMBIE, f"the run ended before {what}"
            assert time.monotonic() < end, f"waited in vain for {what}"
            time.sleep(0.01)

    def suspend(self, rank: int) -> None:
        """Let the process of a rank hang."""
        children = self.process.children(recursive=True)
        next(process for process in children if process.environ().get("RANK") == str(rank)).suspend()

    def kill(self) -> None:
        """Kill the launcher, with which its workers end."""
        processes = [self.process, *self.process.children(recursive=True)]
        self.process.send_signal(signal.SIGKILL)
        assert not psutil.wait_procs(processes, timeout=30)[1], "workers went on"


@pytest.fixture
def launched_run(inputs: Inputs, tmp_path: Path) -> Iterator[LaunchedRun]:
    """Start a run, and kill it after the test if it is left."""
    run = LaunchedRun(inputs, tmp_path / "captions")
    yield run
    if run.process.is_running():
        run.kill()


def merge(output: Path, result: Path) -> MergedRecords:
    """Merge the records of a run into a file of JSON lines, and read it."""
    done = call("merge", output, result)
    assert done.exit_code == 0, done.output
    return lines(result)


@pytest.fixture(scope="module")
def uninterrupted(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> MergedRecords:
    """Return the merged records of one process that nobody interrupted."""
    output = tmp_path_factory.mktemp("uninterrupted") / "new" / "captions"
    done = call(*options_of(inputs, output, batch_size=16))
    assert done.exit_code == 0, done.output
    stdout = done.stdout
    assert f"{ALL} items, {ALL} of them to caption" in stdout and f"{ALL} of {ALL} items in" in stdout
    assert f"{GOOD} of {ALL} records have captions" in stdout and f"{BAD} records failed" in stdout
    assert "model.visual: qwen3_vl, patched" in stdout and "vision tokens/s" in stdout
    (entry,) = json.loads((output / "manifest.json").read_text())["runs"]
    assert entry["records_by_prompt"] == {PROMPT: ALL} and entry["prompts"] == [PROMPT]
    assert (entry["inputs"], entry["processes"], entry["device"]) == (inputs.arguments, 1, "cpu")
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


def test_a_run_that_hangs_and_is_killed_gives_the_same_records(
    inputs: Inputs, uninterrupted: MergedRecords, tmp_path: Path, launched_run: LaunchedRun
) -> None:
    """One of two processes hangs: the other goes on, no second run starts, and no part is merged as if it were all."""
    run = launched_run
    output = run.output
    run.wait_for(lambda: run.count(0) > 0 and run.count(1) > 0, "both processes write")
    run.suspend(1)
    run.wait_for(lambda: run.count(0) >= ALL // 2, "the first process does its share")
    refused = call(*options_of(inputs, output))
    assert refused.exit_code == 2 and "another run is writing to" in refused.output
    missing = call("merge", output, tmp_path / "part.jsonl")
    assert missing.exit_code == 1 and "records are missing" in missing.output
    run.kill()
    with lock(output, alone=True):  # the lock is free
        pass
    written = {(record.key, record.prompt) for record in Journal(output).records()}
    assert len(written) < ALL
    # A power cut often leaves half a line and half a file; a kill seldom does.
    for rank in range(2):
        with run.shard(rank).open("ab") as shard:
            shard.write(b'{"key": "torn \xc3')
    (output / ".manifest.json.2").write_text('{"runs": [{"run"')
    stdout = launched(batch_caption.app, options_of(inputs, output), tmp_path)
    assert f"{ALL} items, {ALL - len(written)} of them to caption" in stdout
    assert stdout.count("of them to caption") == 1 and f"{GOOD} of {ALL} records have captions" in stdout
    assert "process 0:" in stdout and "process 1:" in stdout
    names = Counter((record.key, record.prompt) for record in Journal(output).records())
    assert len(names) == ALL and max(names.values()) == 1, "no record was written twice"
    assert merge(output, tmp_path / "merged.jsonl") == uninterrupted
    assert len(Journal(output).manifest()["runs"]) == 2


SHELL = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
"""
PROCESS = """
import sys, time
sys.path.insert(0, sys.argv[1])
from captioner.files import end_with_launcher
end_with_launcher()
print("begun", flush=True)
time.sleep(60)
"""


def test_a_process_that_nobody_launched_outlives_its_shell() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "LOCAL_"))}
    command = [sys.executable, "-c", SHELL, PROCESS, str(EXAMPLES)]
    shell = psutil.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert shell.stdout.readline() == "begun\n"
    [process] = shell.children()
    try:
        shell.kill()
        shell.wait()
        time.sleep(0.5)
        assert process.status() == psutil.STATUS_SLEEPING
    finally:
        process.kill()
