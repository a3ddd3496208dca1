"""`examples/batch_caption.py` as a user runs it: good and bad files, killed and resumed, refusals and exit codes."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import re
import signal
import struct
import sys
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import batch_caption
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from captioning.journal import Journal, Record
from media.files import lock
from PIL import Image
from programs import EXAMPLES, ROOT, RUNNER, UNIT, WAYS, draw, encode
from programs import launched as in_two

GOOD, BAD = 90, 20  # six of every kind
ALL = GOOD + BAD
ENVIRONMENT = os.environ | {
    "ACCELERATE_USE_CPU": "true",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}


def turned(image: Image.Image, orientation: int, turn: Image.Transpose, format: str, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image.transpose(turn), format, exif=exif, **options)


def clear_corner(image: Image.Image) -> Image.Image:
    """Its upper left pixel clear."""
    image = image.convert("RGBA")
    image.putpixel((0, 0), (0, 0, 0, 0))
    return image


BLUE = Image.new("RGB", (64, 64), "blue")
KINDS: dict[str, Callable[[Image.Image], bytes]] = {
    "png": encode,
    "jpg": lambda image: encode(image, "JPEG", quality=95, subsampling=0),
    "webp": lambda image: encode(image, "WEBP", lossless=True),
    "bmp": lambda image: encode(image, "BMP"),
    "tiff": lambda image: encode(image, "TIFF", compression="tiff_lzw"),
    "gif": lambda image: encode(image.quantize(256), "GIF"),
    "animated.gif": lambda image: encode(
        image.quantize(256), "GIF", save_all=True, append_images=[BLUE.resize(image.size)] * 3
    ),
    "cmyk.jpg": lambda image: encode(image.convert("CMYK"), "JPEG", quality=100, subsampling=0),
    "palette.PNG": lambda image: encode(image.quantize(256)),
    "rgba.png": lambda image: encode(clear_corner(image)),
    "turned.jpeg": lambda image: turned(image, 6, Image.Transpose.ROTATE_90, "JPEG", quality=95, subsampling=0),
    "mirrored.png": lambda image: turned(image, 4, Image.Transpose.FLIP_TOP_BOTTOM, "PNG"),
    "turned.tif": lambda image: turned(image, 8, Image.Transpose.ROTATE_270, "TIFF"),
    "ppm": lambda image: encode(image, "PPM"),
    "avif": lambda image: encode(image, "AVIF", quality=95),
}
IHDR = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
BOMB = b"\x89PNG\r\n\x1a\n\0\0\0\r" + IHDR + struct.pack(">I", zlib.crc32(IHDR)) + b"\0\0\0\0IDAT" + bytes(50)


def bad_files() -> dict[str, tuple[bytes, str]]:
    """Name: content, and what the error says."""
    whole = draw(0)[0]
    half = {
        kind: data[: len(data) // 2] for kind in ("png", "jpg", "webp", "bmp", "gif") for data in [KINDS[kind](whole)]
    }
    truncated = {
        f"bad/truncated.{kind}": (data, "truncated|broken|decode|decoding|not an image") for kind, data in half.items()
    }
    return truncated | {
        "bad/bomb.png": (BOMB, "limit"),
        "bad/empty.jpg": (b"", "the file is empty"),
        "bad/empty.webp": (b"", "the file is empty"),
        "bad/float.tiff": (encode(Image.fromarray(np.ones((64, 64), np.float32)), "TIFF"), "floating-point"),
        "bad/html.gif": (b"<html>404 not found</html>", "not an image"),
        "bad/large.png": (encode(Image.new("1", (10_000, 10_000))), "10000 x 10000 pixels, the limit is 89478485"),
        "bad/noise.jpg": (random.Random(0).randbytes(2000), "not an image"),
        "bad/photo.heic": (b"\0\0\0\x18ftypheic" + bytes(100), "not an image"),
        "bad/script.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not an image"),
        "bad/strip.png": (encode(Image.new("RGB", (3000, 4))), "aspect ratio"),
        "bad/text.jpg": ("Kein Bild.\n".encode("utf-16"), "not an image"),
        "bad/tower.png": (encode(Image.new("RGB", (2, 2000))), "aspect ratio"),
        "bad/video.mp4": (random.Random(1).randbytes(2000), "pip install|Invalid data"),
        "bad/zeros.bmp": (bytes(3000), "not an image"),
        "bad/header.jpg": (KINDS["jpg"](whole)[:20], "not an image|truncated"),
    }


@dataclass(frozen=True)
class Inputs:
    """What is captioned: folder, shard and table; by key, the right captions, and what errors say."""

    arguments: list[str]
    captions: dict[str, str]
    errors: dict[str, str]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """90 scenes of all kinds in folders, a tar shard and a parquet file, and 20 bad files."""
    top = tmp_path_factory.mktemp("inputs")
    captions, rows = {}, []
    with tarfile.open(top / "shard.tar", "w") as archive:

        def add(name: str, data: bytes) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))

        kinds = list(KINDS)
        for seed in range(GOOD):
            image, caption = draw(seed)
            kind = kinds[seed % len(kinds)]
            data, name = KINDS[kind](image), f"{seed:03d}.{kind}"
            if seed % 5 == 4:
                add(name, data)
                captions[f"shard.tar/{name}"] = caption
            elif seed % 10 == 3:
                captions[f"table.parquet#{len(rows):09d}"] = caption
                rows.append({"bytes": data, "path": None})
            else:
                path = top / "scenes" / ["", "sub", "sub/deep é\u2028"][seed % 3] / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                captions[path.relative_to(top).as_posix()] = caption
        errors = {}
        for number, (name, (data, error)) in enumerate(bad_files().items()):
            if number % 5 == 0:
                add(name, data)
                errors[f"shard.tar/{name}"] = error
            else:
                (top / "scenes" / name).parent.mkdir(exist_ok=True)
                (top / "scenes" / name).write_bytes(data)
                errors[f"scenes/{name}"] = error
    pq.write_table(pa.table({"image": rows}), top / "table.parquet", row_group_size=7)
    (top / "scenes" / "notes.md").write_text("no picture")
    assert len(captions) == GOOD and len(errors) == BAD
    return Inputs([str(top / name) for name in ("scenes", "shard.tar", "table.parquet")], captions, errors)


def command(inputs: Inputs, output: Path, processes: int, **options: Any) -> list[str]:
    """Plain for one process, launched for more."""
    script = [str(EXAMPLES / "batch_caption.py"), "caption", *inputs.arguments, f"--output={output}", "--demo"]
    settings = {"max-new-tokens": 24, "batch-size": 4, "decoders": 2} | options
    script += [f"--{name}={value}" for name, value in settings.items()]
    if processes == 1:
        return [sys.executable, *script]
    # `--cpu` would start one process, whatever their number, unless by mpirun; so do not believe in `--multi_gpu`.
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={processes}", "--num_machines=1"]
    return [sys.executable, *launch, "--main_process_port=0", *script]


def merge(output: Path, result: Path) -> list[dict[str, Any]]:
    done = RUNNER.invoke(batch_caption.app, ["merge", str(output), str(result)])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in result.read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.fixture(scope="module")
def uninterrupted(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The merged records of one process that nobody disturbed."""
    output = tmp_path_factory.mktemp("uninterrupted") / "new" / "captions"
    done = RUNNER.invoke(batch_caption.app, command(inputs, output, 1, **{"batch-size": 16})[2:])
    assert done.exit_code == 0, done.output
    stdout = done.stdout
    assert f"{ALL} items, {ALL} of them to caption" in stdout and f"{ALL} of {ALL} items in" in stdout
    assert f"{GOOD} of {ALL} records have captions" in stdout and f"{BAD} records failed" in stdout
    assert "model.visual: qwen3_vl, patched" in stdout and "vision tokens/s" in stdout
    manifest = json.loads((output / "manifest.json").read_text())
    (entry,) = manifest["runs"]
    assert entry["records"] == ALL and entry["processes"] == 1 and entry["device"] == "cpu"
    assert entry["prompts"] == ["describe this {kind} ."] and entry["inputs"] == inputs.arguments
    assert entry["settings"]["max_new_tokens"] == 24 and entry["settings"]["dtype"] == "float32"
    assert entry["versions"].keys() == {"torch", "transformers", "accelerate", "hf_vit_accel", "python"}
    assert "patched" in entry["status"] and "T" in entry["begun"]
    return merge(output, output.parent / "merged.jsonl")


def test_good_files_have_the_right_captions(inputs: Inputs, uninterrupted: list[dict[str, Any]]) -> None:
    good = {record["key"]: record for record in uninterrupted if record["status"] == "ok"}
    assert good.keys() == inputs.captions.keys()
    wrong = {key: record["caption"] for key, record in good.items() if record["caption"] != inputs.captions[key]}
    assert len(wrong) <= 0.1 * len(good), wrong
    kinds = Counter(next((kind for kind in sorted(KINDS, key=len) if key.endswith(kind)), "row") for key in wrong)
    assert max(kinds.values(), default=0) <= 3, kinds  # no kind is read wrongly
    sizes = {draw(seed)[0].size for seed in range(GOOD)}
    assert {(record["width"], record["height"]) for record in good.values()} == sizes
    assert all(record["tokens"] and record["error"] is None for record in good.values())


def test_bad_files_have_reasons(inputs: Inputs, uninterrupted: list[dict[str, Any]]) -> None:
    bad = {record["key"]: record["error"] for record in uninterrupted if record["status"] == "error"}
    assert bad.keys() == inputs.errors.keys()
    assert not {key: bad[key] for key, error in inputs.errors.items() if not re.search(error, bad[key])}
    assert all(record["caption"] is None for record in uninterrupted if record["status"] == "error")


class Launched:
    """A run in the background, to be killed at any moment; of two processes forked, or as a user starts it."""

    def __init__(self, inputs: Inputs, output: Path, processes: int, way: str) -> None:
        self.output = output
        self.before = self.count()
        if way == "forked":
            script, folder = EXAMPLES / "batch_caption.py", output.parent
            given = way, script, batch_caption.app, command(inputs, output, 1)[2:], folder
            launcher = get_context("fork").Process(target=in_two_of_which_one_hangs, args=given)
            launcher.start()
            self.process = psutil.Process(launcher.pid)
            return
        with (output.parent / "log.txt").open("ab") as log:
            self.process = psutil.Popen(command(inputs, output, processes), env=ENVIRONMENT, stdout=log, stderr=log)

    def count(self) -> int:
        return sum(shard.read_bytes().count(b"\n") for shard in Journal(self.output).shards())

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + 120
        while not condition():
            assert self.process.status() != psutil.STATUS_ZOMBIE, f"ended before {what}"
            assert time.monotonic() < until, f"waited in vain for {what}"
            time.sleep(0.01)

    def wait_for_records(self, more: int) -> None:
        self.wait_for(lambda: self.count() >= self.before + more, f"{more} records")

    def family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def worker(self, rank: int) -> psutil.Process:
        return next(each for each in self.family()[1:] if each.environ().get("RANK") == str(rank))

    def kill(self) -> None:
        """The launcher and its workers, each a leader of its own process group, at once."""
        family = self.family()
        for process in family:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=30)


def in_two_of_which_one_hangs(*given: Any) -> None:
    """The second, after its first records."""
    append = Journal.append

    def stopping(self: Journal, process: int, records: Any) -> None:
        append(self, process, records)
        if process == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    Journal.append = stopping
    in_two(*given)


@pytest.fixture
def launched() -> Iterator[list[Launched]]:
    """Whatever a test puts here is killed after it."""
    runs: list[Launched] = []
    yield runs
    for each in runs:
        if each.process.is_running():
            each.kill()


@pytest.mark.parametrize("way", WAYS)
def test_runs_that_hang_and_are_killed_give_the_same_records(
    inputs: Inputs, uninterrupted: list[dict[str, Any]], tmp_path: Path, launched: list[Launched], way: str
) -> None:
    """First two processes, of which one hangs, then, where they are launched, one, all killed; then two that end."""
    output, chance = tmp_path / "captions", random.Random()
    sizes = (2,) if way == "forked" else (2, 1)
    for number, processes in enumerate(sizes, start=1):
        launched.append(Launched(inputs, output, processes, way))
        # Another process may write records before the first one has noted the run.
        launched[-1].wait_for(lambda count=number: len(Journal(output).manifest()["runs"]) == count, "the run is noted")
        if processes == 2:
            check_the_other_goes_on(launched[-1], inputs, way)
        else:
            launched[-1].wait_for_records(chance.randint(1, 15))
            time.sleep(chance.uniform(0, 0.3))
        launched[-1].kill()
        with lock(output, alone=True):
            pass
        assert launched[-1].count() < ALL
        # What a kill seldom leaves, and a power cut often does: half a line, and half a file.
        with chance.choice(Journal(output).shards()).open("ab") as shard:
            shard.write(b'{"key": "torn \xc3')
        (output / f".manifest.json.{processes}").write_text('{"runs": [{"run"')
    known = Counter((record.key, record.prompt) for record in Journal(output).records())
    stdout = in_two(
        "forked", EXAMPLES / "batch_caption.py", batch_caption.app, command(inputs, output, 1)[2:], tmp_path
    )
    assert f"{ALL} items, {ALL - len(known)} of them to caption" in stdout
    assert stdout.count("of them to caption") == 1 and f"{GOOD} of {ALL} records have captions" in stdout
    assert "process 0:" in stdout and "process 1:" in stdout
    lines = Counter((record.key, record.prompt) for record in Journal(output).records())
    assert len(lines) == ALL and max(lines.values()) == 1  # not one line twice, in all shards
    assert merge(output, tmp_path / "merged.jsonl") == uninterrupted
    table = pq.read_table(tmp_path / "merged.parquet") if merge_parquet(output, tmp_path) else None
    assert table is not None and table.to_pylist() == uninterrupted
    assert len(json.loads((output / "manifest.json").read_text())["runs"]) == len(sizes) + 1


def merge_parquet(output: Path, folder: Path) -> bool:
    return RUNNER.invoke(batch_caption.app, ["merge", str(output), str(folder / "merged.parquet")]).exit_code == 0


def check_the_other_goes_on(two: Launched, inputs: Inputs, way: str) -> None:
    """A process that hangs stops no other, and keeps the folder: no second run, no merge of a part."""
    output = two.output
    two.wait_for(lambda: all((output / f"captions-{rank:05d}.jsonl").exists() for rank in range(2)), "both to write")
    if way != "forked":
        two.worker(1).suspend()

    def first_is_done() -> bool:
        counts = json.loads((output / ".progress" / "00000.json").read_text())
        return counts["items"] == counts["of"]

    two.wait_for(first_is_done, "the first process to do its share")
    assert two.count() < ALL
    refused = RUNNER.invoke(batch_caption.app, ["caption", *inputs.arguments, f"--output={output}", "--demo"])
    assert refused.exit_code == 2 and "another run is writing to" in refused.output
    missing = RUNNER.invoke(batch_caption.app, ["merge", str(output), str(output.parent / "part.jsonl")])
    assert missing.exit_code == 1 and "records are missing" in missing.output


# --- the command line ------------------------------------------------------------------------------------------------


LOADED = lru_cache(maxsize=4)(batch_caption.load_model)


@pytest.fixture(autouse=True)
def load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_caption, "load_model", lambda *arguments: copy.deepcopy(LOADED(*arguments)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three scenes and a file that is none."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for seed in range(3):
        image, caption = draw(seed)
        image.save(folder / f"{seed}.png")
        (folder / f"{seed}.json").write_text(json.dumps({"caption": caption}))
    (folder / "bad.png").write_bytes(b"no picture")
    return folder


def caption(folder: Path | str, *options: Any, code: int = 0) -> str:
    """Captions into a folder beside; the output."""
    output = Path(folder).parent / "captions"
    arguments = ["caption", str(folder), f"--output={output}", "--demo", "--max-new-tokens=24", *map(str, options)]
    done = RUNNER.invoke(batch_caption.app, arguments)
    assert done.exit_code == code, (done.output, done.exception)
    return " ".join(done.output.split())


def records(folder: Path) -> dict[str, Record]:
    found = Journal(folder.parent / "captions").merged()
    return {record.key: record for record in found}


def ok(folder: Path) -> dict[str, str | None]:
    return {key: record.caption for key, record in records(folder).items() if record.status == "ok"}


def right(folder: Path) -> dict[str, str]:
    return {f"{path.stem}.png": json.loads(path.read_text())["caption"] for path in folder.glob("*.json")}


def test_what_is_done_is_not_done_again(folder: Path) -> None:
    assert "4 items, 4 of them to caption" in caption(folder)
    assert ok(folder) == right(folder)
    before = list(Journal(folder.parent / "captions").records())
    assert "4 items, 0 of them to caption" in caption(folder, "--batch-size=1", "--batch-tokens=7", "--attention=sdpa")
    assert list(Journal(folder.parent / "captions").records()) == before
    assert "4 items, 4 of them to caption" in caption(folder, "--prompt=describe this video .", "--no-patch")
    assert "4 items, 4 of them to caption" in caption(folder, "--max-new-tokens=3")
    assert "4 items, 4 of them to caption" in caption(folder, "--temperature=0.5")
    assert "4 items, 4 of them to caption" in caption(folder, "--temperature=0.5", "--seed=1")
    assert "4 items, 0 of them to caption" in caption(folder, "--temperature=0.5")
    merged = RUNNER.invoke(
        batch_caption.app,
        [
            "merge",
            str(folder.parent / "captions"),
            str(folder.parent / "x.jsonl"),
            f"--run={before[0].run}",
            "--all-prompts",
        ],
    )
    assert merged.exit_code == 0 and "6 of 8 records have captions" in merged.output  # of two prompts
    kept = list(Journal(folder.parent / "captions").records())
    assert "4 items, 4 of them to caption" in caption(folder, "--overwrite")
    assert ok(folder) == right(folder)
    assert list(Journal(folder.parent / "captions").records())[: len(kept)] == kept


def test_changed_files_and_errors_are_done_again(folder: Path) -> None:
    caption(folder)
    draw(7)[0].save(folder / "0.png")
    assert "4 items, 1 of them to caption" in caption(folder)
    assert ok(folder) == right(folder) | {"0.png": draw(7)[1]}
    assert "4 items, 1 of them to caption" in caption(folder, "--retry-errors")
    draw(8)[0].save(folder / "bad.png")
    assert "4 items, 1 of them to caption" in caption(folder)
    assert ok(folder)["bad.png"] == draw(8)[1] and len(list(Journal(folder.parent / "captions").records())) == 4


def test_several_prompts_with_metadata(folder: Path) -> None:
    prompts = "describe this {kind} .", "{stem} {caption}"
    expected = right(folder)
    (folder / "1.json").unlink()
    options = [f"--prompt={prompt}" for prompt in (*prompts, prompts[0])]
    assert "3 records failed" in caption(folder, *options)
    together = Journal(folder.parent / "captions").merged()
    assert len(together) == 8 and {each.asked for each in together} >= {
        "describe this picture .",
        "0 " + expected["0.png"],
    }
    assert {each.key: each.caption for each in together if each.prompt == prompts[0] and each.caption} == expected
    errors = {each.key: each.error or "" for each in together if each.prompt == prompts[1] and each.error}
    assert errors.keys() == {"1.png", "bad.png"} and "the prompt names {caption}" in errors["1.png"]
    caption(folder, options[1], "--overwrite", "--max-failures=1")
    assert "4 items, 4 of them to caption" in caption(folder, options[0])
    again = {(each.key, each.prompt): each.caption for each in Journal(folder.parent / "captions").records()}
    assert again == {(each.key, each.prompt): each.caption for each in together}


def test_dry_runs_do_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(batch_caption, "load_model", lambda *_: pytest.fail("loaded"))
        output = caption(folder, "--dry-run")
    tokens = sum(image.width * image.height // UNIT**2 for image, _ in map(draw, range(3)))
    assert (
        "4 items, 4 of them to caption" in output
        and f"process 0: 4 items, {tokens} tokens, 1 batches, 100.0%" in output
    )
    assert [path.name for path in folder.parent.iterdir()] == ["pictures"]
    caption(folder, "--limit=2")
    shard = folder.parent / "captions" / "captions-00000.jsonl"
    with shard.open("ab") as file:
        file.write(b"torn")
    before = {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*")}
    with lock(folder.parent / "captions", alone=True):
        before[folder.parent / "captions" / ".lock"] = (folder.parent / "captions" / ".lock").stat().st_mtime_ns
        assert "4 items, 2 of them to caption" in caption(folder, "--dry-run")
        assert "4 items, 4 of them to caption" in caption(folder, "--dry-run", "--overwrite")
    assert {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*")} == before


def test_limits_are_of_the_first_items(folder: Path) -> None:
    assert "2 items, 2 of them to caption" in caption(folder, "--limit=2")
    assert ok(folder) == {key: text for key, text in right(folder).items() if key < "2"}
    assert "3 items, 1 of them to caption" in caption(folder, "--limit=3")


def test_exit_codes_tell_of_failures(folder: Path) -> None:
    caption(folder)  # a quarter failed, half may
    assert "0 of them to caption" in caption(folder, "--max-failures=0.25")
    caption(folder, "--max-failures=0.2", code=1)
    output = folder.parent / "captions"

    def merged(*options: str, run: str | Path = output) -> Any:
        return RUNNER.invoke(batch_caption.app, ["merge", str(run), str(folder.parent / "out.jsonl"), *options])

    assert merged().exit_code == 0 and merged("--max-failures=0.2").exit_code == 1
    for done, message in (
        (merged(run=folder), "no run has written to"),
        (merged("--run=unknown"), "no run unknown has written to"),
        (
            RUNNER.invoke(batch_caption.app, ["merge", str(output), str(folder.parent / "out.csv")]),
            ".jsonl, .parquet or .tar",
        ),
    ):
        assert done.exit_code == 2 and message in done.output, done.output
    done = RUNNER.invoke(batch_caption.app, ["merge", str(output), str(folder / "0.png" / "x.jsonl")])
    assert done.exit_code == 1 and "cannot write" in done.output and "0.png" in done.output, done.output
    for path in folder.glob("?.png"):
        path.unlink()
    caption(folder, "--output", folder.parent / "others", code=1)
    caption(folder, "--output", folder.parent / "others", "--max-failures=1")


def test_captions_beside_the_pictures(folder: Path) -> None:
    caption(folder)
    done = RUNNER.invoke(batch_caption.app, ["merge", str(folder.parent / "captions"), str(folder)])
    assert done.exit_code == 0
    found = {f"{path.stem}.png": path.read_text() for path in folder.glob("*.txt")}
    assert found == {key: text + "\n" for key, text in right(folder).items()}


def test_missing_records_are_told(folder: Path) -> None:
    caption(folder)
    (shard,) = Journal(folder.parent / "captions").shards()
    shard.write_bytes(b"\n".join(shard.read_bytes().split(b"\n")[:3]))  # two whole lines, and one without its end
    done = RUNNER.invoke(batch_caption.app, ["merge", str(folder.parent / "captions"), str(folder.parent / "x.jsonl")])
    assert done.exit_code == 1 and "2 records are missing" in done.output
    assert "4 items, 2 of them to caption" in caption(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attention=unknown"], "unknown"),
        (["--dtype=int8"], "int8"),
        (["--column=x", "{folder}/none.parquet"], "no file"),
        (["{folder}/../empty"], "no images or videos in"),
        (["{folder}/*.webp"], "no images or videos in|no file"),
        (["dataset:nowhere"], "pip install datasets"),
        (["--min-pixels=5000", "--max-pixels=4000"], "is above --max-pixels"),
        (["--model=x"], "name a model"),
        (["--output={folder}/0.png"], "0.png"),
        (["--limit=0"], "limit"),
    ],
)
def test_mistakes_are_refused(folder: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (folder.parent / "empty").mkdir()
    (folder / "sub").mkdir()
    (folder / "sub" / "0.png").touch()
    output = caption(folder, *(option.replace("{folder}", str(folder)) for option in options), code=2)
    assert re.search(message, output), output
    assert not list((folder.parent).glob("captions/captions-*"))


@pytest.mark.parametrize("model", ["{folder}", "no-such/model", "{folder}/0.png"])
def test_models_that_are_none_are_refused(folder: Path, model: str) -> None:
    arguments = ["caption", str(folder), f"--output={folder.parent / 'x'}"]
    done = RUNNER.invoke(batch_caption.app, [*arguments, "--model", model.replace("{folder}", str(folder))])
    assert done.exit_code == 2 and "Traceback" not in done.output and isinstance(done.exception, SystemExit)
    assert re.search("holds no checkpoint|cannot load|name the folder of the checkpoint", done.output), done.output


def test_samples_do_not_depend_on_batches_or_order(folder: Path) -> None:
    for seed in range(3, 10):
        draw(seed)[0].save(folder / f"{seed}.png")
    options = ["--temperature=2.5", "--seed=3"]
    caption(folder, *options, "--batch-size=1")
    alone = ok(folder)
    caption(folder, *options, "--batch-size=8", "--overwrite")
    assert ok(folder) == alone and len(alone) == 10
    caption(folder, "--temperature=2.5", "--seed=4")
    assert sum(ok(folder)[key] != text for key, text in alone.items()) >= 5


def test_a_record_can_be_made_of_every_line(folder: Path) -> None:
    caption(folder)
    (shard,) = Journal(folder.parent / "captions").shards()
    lines = [json.loads(line) for line in shard.read_text().splitlines()]
    assert sorted(map(str, lines)) == sorted(str(asdict(record)) for record in records(folder).values())
