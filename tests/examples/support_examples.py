"""Files of every kind for the captioning example, good and bad ones, and runs of it that can be killed."""

from __future__ import annotations

import io
import os
import random
import signal
import struct
import sys
import tarfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from captioner import main as batch_caption
from captioner.journal import Journal, Record
from PIL import Image
from programs import CAPTIONERS, EXAMPLES, ROOT, draw, encode, launched

GOOD = 30
"""The number of good files."""
BAD = 12
ALL = GOOD + BAD
ENVIRONMENT = os.environ | {
    "ACCELERATE_USE_CPU": "true",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}


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
IHDR = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
BOMB = b"\x89PNG\r\n\x1a\n\0\0\0\r" + IHDR + struct.pack(">I", zlib.crc32(IHDR)) + b"\0\0\0\0IDAT" + bytes(50)
"""A tiny PNG file of 100,000 x 100,000 pixels."""


def bad_files() -> dict[str, tuple[bytes, str]]:
    """Return the content of every bad file, and a pattern of its error, by name."""
    image = draw(0)[0]
    files = {}
    for kind in ("png", "jpg", "gif"):
        data = KINDS[kind](image)
        files[f"bad/truncated.{kind}"] = (data[: len(data) // 2], "truncated|broken|decode|decoding|not an image")
    return files | {
        "bad/bomb.png": (BOMB, "limit"),
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


def write_inputs(top: Path) -> Inputs:
    """Write 30 scenes of all kinds and the bad files into folders, a tar shard and a parquet file."""
    captions: dict[str, str] = {}
    errors: dict[str, str] = {}
    rows: list[dict[str, bytes | None]] = []
    kinds = list(KINDS)
    with tarfile.open(top / "shard.tar", "w") as archive:
        for seed in range(GOOD):
            image, caption = draw(seed)
            kind = kinds[seed % len(kinds)]
            data = KINDS[kind](image)
            name = f"{seed:03d}.{kind}"
            if seed % 5 == 4:
                _add(archive, name, data)
                captions[f"shard.tar/{name}"] = caption
            elif seed % 10 == 3:
                captions[f"table.parquet#{len(rows):09d}"] = caption
                rows.append({"bytes": data, "path": None})
            else:
                path = top / "scenes" / ["", "sub", "sub/deep é\u2028"][seed % 3] / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                captions[path.relative_to(top).as_posix()] = caption
        for number, (name, (data, error)) in enumerate(bad_files().items()):
            if number % 5 == 0:
                _add(archive, name, data)
                errors[f"shard.tar/{name}"] = error
            else:
                (top / "scenes" / name).parent.mkdir(exist_ok=True)
                (top / "scenes" / name).write_bytes(data)
                errors[f"scenes/{name}"] = error
    pq.write_table(pa.table({"image": rows}), top / "table.parquet", row_group_size=3)
    (top / "scenes" / "notes.md").write_text("no picture")
    assert len(captions) == GOOD and len(errors) == BAD
    return Inputs([str(top / name) for name in ("scenes", "shard.tar", "table.parquet")], captions, errors)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


# --- runs ------------------------------------------------------------------------------------------------------------


def options_of(inputs: Inputs, output: Path, **options: object) -> list[str]:
    """Return the arguments of `captioner/main.py`."""
    settings = {"max-new-tokens": 24, "batch-size": 4} | options
    by_name = [f"--{name}={value}" for name, value in settings.items()]
    model = [f"--model={CAPTIONERS / 'qwen3_vl'}", "--prompt=describe this {kind} ."]
    return ["caption", *inputs.arguments, f"--output={output}", *model, *by_name]


def command(inputs: Inputs, output: Path, processes: int) -> list[str]:
    """Return the command that captions the inputs in so many processes."""
    script = [str(EXAMPLES / "captioner" / "main.py"), *options_of(inputs, output)]
    # `--cpu` starts one process unless mpirun starts it; `--multi_gpu` starts the number that is given, on CPUs too.
    launch = ["--multi_gpu", f"--num_processes={processes}", "--num_machines=1", "--main_process_port=0"]
    return [sys.executable, "-m", "accelerate.commands.launch", *(launch if processes > 1 else ["--cpu"]), *script]


class BackgroundRun:
    """A captioning run in the background that can be killed at any moment.

    It is two forked processes of which one hangs, or starts as a user starts it.
    """

    def __init__(self, inputs: Inputs, output: Path, processes: int, way: str) -> None:
        self.output = output
        self.records_before = self.count()
        self.is_forked = way == "forked"
        if self.is_forked:
            arguments = (options_of(inputs, output), output.parent)
            launcher = get_context("fork").Process(target=_run_two_of_which_one_hangs, args=arguments)
            launcher.start()
            self.process = psutil.Process(launcher.pid)
            return
        with (output.parent / "log.txt").open("ab") as log:
            self.process = psutil.Popen(command(inputs, output, processes), env=ENVIRONMENT, stdout=log, stderr=log)

    def count(self) -> int:
        """Count the records that were written."""
        return sum(shard.read_bytes().count(b"\n") for shard in Journal(self.output).shards())

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds; `what` names it if the run ends or two minutes pass before."""
        end = time.monotonic() + 120
        while not condition():
            assert self.process.status() != psutil.STATUS_ZOMBIE, f"the run ended before {what}"
            assert time.monotonic() < end, f"waited in vain for {what}"
            time.sleep(0.01)

    def wait_for_records(self, count: int) -> None:
        """Wait until the run has written this many records."""
        self.wait_for(lambda: self.count() >= self.records_before + count, f"{count} records")

    def worker(self, rank: int) -> psutil.Process:
        """Return the process of a rank."""
        children = self.process.children(recursive=True)
        return next(process for process in children if process.environ().get("RANK") == str(rank))

    def kill(self) -> None:
        """Kill the launcher, with which its workers end. Forked ones, which no launcher started, are killed, too."""
        processes = [self.process, *self.process.children(recursive=True)]
        for process in processes if self.is_forked else processes[:1]:
            process.send_signal(signal.SIGKILL)
        assert not psutil.wait_procs(processes, timeout=30)[1], "workers went on"

    def first_process_is_done(self) -> bool:
        """Whether the first process has captioned its share, which is half of the items."""
        shard = self.output / "captions-00000-00000.jsonl"
        return shard.read_bytes().count(b"\n") >= ALL // 2


def _run_two_of_which_one_hangs(arguments: list[str], folder: Path) -> None:
    """Run two processes; the second one stops after its first records."""
    append = Journal.append

    def append_and_stop(self: Journal, process: int, records: list[Record]) -> None:
        append(self, process, records)
        if process == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    Journal.append = append_and_stop
    launched(batch_caption.app, arguments, folder)
