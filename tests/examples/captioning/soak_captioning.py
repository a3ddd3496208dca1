"""Kill a long run of `examples/captioner/main.py` again and again, and look for lost, doubled, torn or changed records.

    python tests/examples/captioning/soak_captioning.py build/soak --pictures 20000 --kills 12

Draws pictures of all kinds in linked folders, tar shards and a table. Many are odd, some are damaged, and some have a
text written by hand. Two processes caption them and are killed at random moments. Every start spells the input in
another way, and in the middle the prompt changes. Prints figures, and exits with 1 if something is wrong.
"""

# ruff: noqa: E402, the helpers below are found by path if this runs as a program

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDERS = ("tests/examples", "examples", "tests/tiny_captioner")
sys.path[:0] = [str(REPOSITORY / folder) for folder in FOLDERS]

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from captioner.journal import Journal
from PIL import Image
from programs import EXAMPLES, ROOT, draw, encode
from support_captioning import MODEL, call, write_tar

PROMPTS = ("describe this picture .", "is the text above ?")
SCRIPT = EXAMPLES / "captioner" / "main.py"
ENVIRONMENT = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def contents(count: int) -> Iterator[tuple[str, bytes, bool]]:
    """Yield suffix and bytes of files, and whether they are pictures: good ones of every kind, and damaged ones."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for seed in range(count):
        image = draw(seed)[0]
        complete = encode(image)
        turned = image.transpose(Image.Transpose.ROTATE_90)
        yield ".png", complete, True
        yield ".jpg", encode(image, "JPEG", quality=95), True
        yield ".WEBP", encode(image, "WEBP", lossless=True), True
        yield ".tiff", encode(image, "TIFF", compression="tiff_lzw"), True
        yield ".gif", encode(image.quantize(256), "GIF"), True
        yield ".cmyk.jpg", encode(image.convert("CMYK"), "JPEG", quality=95), True
        yield ".jpeg", encode(turned, "JPEG", quality=95, exif=exif), True
        yield ".p.png", encode(image.quantize(256)), True
        yield ".a.png", encode(image.convert("RGBA")), True
        yield ".16.png", encode(Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)), True
        yield ".bmp", encode(image, "BMP"), True
        yield ".1.png", encode(Image.new("RGB", (1, 1))), True
        yield ".cut.png", complete[: len(complete) // 2], False
        yield ".empty.jpg", b"", False
        yield ".html.gif", b"<html>404</html>", False
        yield ".strip.png", encode(Image.new("RGB", (3000, 4))), False
        if seed == 0:
            large = image.resize((6000, 4000), Image.Resampling.BICUBIC)
            yield ".large.jpg", encode(large, "JPEG", quality=85), True


@dataclass
class Data:
    """The files on disk.

    Args:
        top: Their folder.
        good: Digests of the pictures' bytes, by key.
        bad: Keys of damaged files.
        texts: Texts that were written by hand, by path.
    """

    top: Path
    good: dict[str, str] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    texts: dict[Path, bytes] = field(default_factory=dict)

    def add(self, key: str, data: bytes, is_good: bool) -> None:
        if is_good:
            self.good[key] = hashlib.sha256(data).hexdigest()
        else:
            self.bad.add(key)


def lay_out(top: Path, pictures: int, chance: random.Random) -> Data:
    """Write the pictures: nine in ten as files, also in a linked folder and under odd names, the others in shards."""
    data = Data(top)
    kinds = list(contents(max(2, min(24, pictures // 40))))
    members: list[list[tuple[str, bytes]]] = [[], []]
    rows: list[bytes] = []
    odd = ["é\u2028", "new\nline", "emoji 🦊", "a' \"b", "#%?", "x" * 120, os.fsdecode(b"latin\xe9")]
    for index in range(pictures):
        suffix, content, good = kinds[index % len(kinds)]
        if index % 20 == 7:
            shard = index // 20 % 2
            members[shard].append((f"{index}{suffix}", content))
            data.add(f"shards/{shard}.tar/{index}{suffix}", content, good)
        elif index % 20 == 13:
            data.add(f"table.parquet#{len(rows):09d}", content, good)
            rows.append(content)
        else:
            name = f"{index:06d}{f' {chance.choice(odd)}' if index % 11 == 0 else ''}{suffix}"
            folder = ["photos", f"photos/{index % 7}", f"photos/{index % 7}/deep", "elsewhere"][index % 4]
            (top / folder).mkdir(parents=True, exist_ok=True)
            (top / folder / name).write_bytes(content)
            data.add(f"{folder}/{name}", content, good)
            if index % 17 == 0:
                data.texts[(top / folder / name).with_suffix(".txt")] = f"by hand {index}".encode()
    (top / "shards").mkdir()
    for number, shard_members in enumerate(members):
        write_tar(top / "shards" / f"{number}.tar", *shard_members)
    pq.write_table(pa.table({"image": rows}), top / "table.parquet", row_group_size=50)
    (top / "photos" / "linked").symlink_to(top / "elsewhere")
    (top / "photos" / "circle").symlink_to(top / "photos")
    (top / "photos" / "gone.jpg").symlink_to(top / "nowhere.jpg")
    (top / "link").symlink_to(top)
    for path, text in data.texts.items():
        path.write_bytes(text)
    with (top / "list.txt").open("w", errors="surrogateescape") as file:  # without names that hold a line end
        files = (path for folder in ("photos", "elsewhere") for path in sorted((top / folder).rglob("*.*")))
        files = (path for path in files if "\n" not in path.name and path.is_file())
        file.writelines(f"{path}\n" for path in files if path.suffix != ".txt")
    return data


def spellings(top: Path) -> list[list[str]]:
    """Return several spellings of the inputs, and of parts of them."""
    shards = [f"{top}/shards/0.tar", f"{top}/shards/1.tar"]
    table = [f"{top}/table.parquet"]
    return [
        [f"{top}/photos", f"{top}/elsewhere", *shards, *table],
        [f"{top}/photos/linked", f"{top}/photos", *shards, *table],
        [
            os.path.relpath(top / "photos"),
            f"{top}/shards/0.tar",
            f"{top}/link/shards/1.tar",
            f"{top}/link/table.parquet",
        ],
        [f"{top}/list.txt", *shards],
        [f"{top}/link/photos/", *table],
        [f"{top}/photos/3", f"{top}/photos/3/../5", *shards],
    ]


@dataclass
class Watch:
    """A launcher and its two processes.

    Args:
        output: Folder of the records.
        process: The launcher.
        memory: Bytes of the larger process, by minute of the run.
    """

    output: Path
    process: psutil.Popen
    memory: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def until(self, records: int | None) -> bool:
        """Wait for so many records, or for the end. Return whether the run ended."""
        while self.process.poll() is None:
            if records is not None and count(self.output) >= records:
                return False
            for child in self.children():
                try:
                    used = child.memory_info().rss
                except psutil.Error:
                    continue
                minute = int(time.time() - self.process.create_time()) // 60
                self.memory[minute] = max(self.memory[minute], used)
            time.sleep(0.1)
        return True

    def children(self) -> list[psutil.Process]:
        try:
            return self.process.children(recursive=True)
        except psutil.Error:
            return []

    def kill(self) -> None:
        family = [self.process, *self.children()]
        for process in family:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
        psutil.wait_procs(family, timeout=30)


def start(inputs: list[str], output: Path, prompt: str, log: Path) -> Watch:
    """Start two processes."""
    options = [f"--output={output}", f"--model={MODEL}", f"--prompt={prompt}", "--max-new-tokens=4", "--max-failures=1"]
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    command = [sys.executable, *launch, "--main_process_port=0", str(SCRIPT), "caption", *inputs, *options]
    with log.open("ab") as file:
        return Watch(output, psutil.Popen(command, env=ENVIRONMENT, stdout=file, stderr=file))


def count(output: Path) -> int:
    return sum(shard.read_bytes().count(b"\n") for shard in Journal(output).shards())


def problems(data: Data, output: Path) -> list[str]:
    """List the problems of the records of a run that ended."""
    problems_found: list[str] = []
    for shard in Journal(output).shards():
        lines = shard.read_bytes().split(b"\n")
        lines.pop()  # a kill may tear the last line
        problems_found += [f"{shard.name}: {line[:80]!r}" for line in lines if not _parses(line)]
    records = Journal(output).records()
    times = Counter((record.key, record.prompt) for record in records)
    expected = {(key, prompt) for key in (*data.good, *data.bad) for prompt in PROMPTS}
    problems_found += [f"missing: {name}" for name in expected - times.keys()]
    problems_found += [f"unknown: {name}" for name in times.keys() - expected]
    problems_found += [f"{number} times: {name}" for name, number in times.items() if number > 1]
    captions: dict[tuple[str, str], set[str | None]] = defaultdict(set)
    for record in records:
        if (record.status == "ok") != (record.key in data.good):
            problems_found.append(f"{record.status}: {record.key}: {record.error}")
        elif record.status == "ok":
            captions[data.good[record.key], record.prompt].add(record.caption)
    problems_found += [f"one picture, two captions: {texts}" for texts in captions.values() if len(texts) > 1]
    return problems_found


def _parses(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def check_merge(data: Data, output: Path) -> list[str]:
    """Merge texts beside the pictures, and list the problems: those written by hand must stay."""
    done = call("merge", output, data.top, *(f"--prompt={prompt}" for prompt in PROMPTS), "--max-failures=1")
    problems_found = [f"changed: {path}" for path, text in data.texts.items() if path.read_bytes() != text]
    if data.texts and done.exit_code != 1:
        problems_found.append(f"merge ended with {done.exit_code}: {done.output[-500:]}")
    texts = {path for folder in ("photos", "elsewhere") for path in (data.top / folder).rglob("*.txt")}
    pictures = {path for folder in ("photos", "elsewhere") for path in (data.top / folder).rglob("*.*")} - texts
    stems = {path.with_suffix("") for path in pictures}
    problems_found += [f"beside no picture: {path}" for path in texts if path.with_suffix("") not in stems]
    written = len(texts) - len(data.texts)
    files = [key for key in data.good if key.startswith(("photos/", "elsewhere/"))]
    with_own_text = sum((data.top / key).with_suffix(".txt").resolve() in data.texts for key in files)
    if written != len(files) - with_own_text:
        problems_found.append(f"{written} texts were written, {len(files) - with_own_text} were to be")
    return problems_found


def soak(folder: Path, pictures: int, kills: int, seed: int) -> dict[str, object]:
    """Run the soak, and return its figures and its problems."""
    chance = random.Random(seed)
    output = folder / "captions"
    folder.mkdir(parents=True)
    data = lay_out(folder.resolve() / "data", pictures, chance)
    begun = time.monotonic()
    spelt = spellings(data.top)
    done = 0
    memory = []
    log = folder / "log.txt"
    total = len(data.good) + len(data.bad)
    for number in range(kills):
        prompt = PROMPTS[number >= kills / 2]
        inputs = spelt[0] if number == 0 else chance.choice(spelt)
        watch = start(inputs, output, prompt, log)
        ended = watch.until(count(output) + chance.randint(1, max(2, int(1.6 * total / kills))))
        if ended and watch.process.wait() != 0:
            raise RuntimeError(f"a run failed before it was killed, see {log}")
        time.sleep(chance.uniform(0, 0.5))
        watch.kill()
        done += not ended
        memory.append(watch.memory)
    for prompt in PROMPTS:
        watch = start(spelt[0], output, prompt, log)
        watch.until(None)
        memory.append(watch.memory)
        if watch.process.wait() != 0:
            raise RuntimeError(f"the last run failed, see {log}")
    megabytes = [{minute: used >> 20 for minute, used in sorted(by_minute.items())} for by_minute in memory]
    wrong = problems(data, output) + check_merge(data, output)
    return {
        "pictures": pictures,
        "damaged": len(data.bad),
        "by hand": len(data.texts),
        "kills": kills,
        "kills while captioning": done,
        "records": len(Journal(output).records()),
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "MB of the larger process, by minute of each start": megabytes,
        "problems": wrong[:20],
    }


def main(
    folder: Annotated[Path, typer.Argument(help="A new folder for all files.")],
    pictures: Annotated[int, typer.Option(min=40)] = 20_000,
    kills: Annotated[int, typer.Option(min=1)] = 12,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Run the soak. Exits with 1 if something is wrong."""
    figures = soak(folder, pictures, kills, seed)
    print(json.dumps(figures, indent=1, default=str))
    raise typer.Exit(bool(figures["problems"]))


if __name__ == "__main__":
    typer.run(main)
