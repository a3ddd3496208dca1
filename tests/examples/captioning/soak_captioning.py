"""A long run of `examples/batch_caption.py` that is killed again and again: is anything lost, doubled, torn or changed?

    python tests/examples/captioning/soak_captioning.py build/soak --pictures 20000 --kills 12

Draws pictures of all kinds, many of them odd, some damaged, in linked folders, tar shards and a table, some with a text
written by hand. Two processes caption them; both are killed at random moments; each start spells the input otherwise,
and in the middle the prompt changes. Prints figures and exits with 1 if something is wrong.
"""

# ruff: noqa: E402, as a program it finds its helpers by itself

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
from typing import Annotated, Any

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDERS = ("tests/examples", "examples", "examples/tiny_captioner")
sys.path[:0] = [str(REPOSITORY / folder) for folder in FOLDERS]

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from captioning.journal import Journal
from PIL import Image
from programs import EXAMPLES, ROOT, draw, encode
from support_captioning import MODEL, call, write_tar

PROMPTS = ("describe this picture .", "is the text above ?")
SCRIPT = EXAMPLES / "batch_caption.py"
ENVIRONMENT = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def contents(count: int) -> Iterator[tuple[str, bytes, bool]]:
    """Suffix and bytes of files, and whether they are pictures: good ones of every kind, and damaged ones."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for seed in range(count):
        image = draw(seed)[0]
        whole = encode(image)
        turned = image.transpose(Image.Transpose.ROTATE_90)
        yield ".png", whole, True
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
        yield ".cut.png", whole[: len(whole) // 2], False
        yield ".empty.jpg", b"", False
        yield ".html.gif", b"<html>404</html>", False
        yield ".strip.png", encode(Image.new("RGB", (3000, 4))), False
        if seed == 0:
            large = image.resize((6000, 4000), Image.Resampling.BICUBIC)
            yield ".large.jpg", encode(large, "JPEG", quality=85), True


@dataclass
class Data:
    """What lies on disk. good: the bytes' digest of each picture's key; bad: keys; texts: what was written by hand."""

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
    """So many pictures: nine in ten as files, also in a linked folder and under odd names, the others in shards."""
    data, kinds = Data(top), list(contents(max(2, min(24, pictures // 40))))
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
            data.add(f"{folder.replace('elsewhere', 'photos/linked')}/{name}", content, good)
            if index % 17 == 0:
                data.texts[(top / folder / name).with_suffix(".txt")] = f"by hand {index}".encode()
    (top / "shards").mkdir()
    for number, each in enumerate(members):
        write_tar(top / "shards" / f"{number}.tar", *each)
    pq.write_table(pa.table({"image": rows}), top / "table.parquet", row_group_size=50)
    (top / "photos" / "linked").symlink_to(top / "elsewhere")
    (top / "photos" / "zz again").symlink_to(top / "elsewhere")
    (top / "photos" / "gone.jpg").symlink_to(top / "nowhere.jpg")
    (top / "link").symlink_to(top)
    for path, text in data.texts.items():
        path.write_bytes(text)
    with (top / "list.txt").open("w", errors="surrogateescape") as file:  # what a line can hold
        files = (path for path in sorted((top / "photos").rglob("*.*")) if "\n" not in path.name and path.is_file())
        file.writelines(f"{path}\n" for path in files if path.suffix != ".txt")
    return data


def spellings(top: Path) -> list[list[str]]:
    """The same inputs, and parts of them."""
    shards, table = [f"{top}/shards/*.tar"], [f"{top}/table.parquet"]
    return [
        [f"{top}/photos", *shards, *table],
        [f"{top}/photos/**/*.*", *shards, *table],
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
    """The launcher and its two processes. memory: most bytes of one of them, by tenths of the run's records."""

    output: Path
    process: psutil.Popen
    memory: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def until(self, records: int | None) -> bool:
        """Wait for so many records, or for the end; whether it is the end."""
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
        for each in family:
            try:
                each.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
        psutil.wait_procs(family, timeout=30)


def start(inputs: list[str], output: Path, prompt: str, log: Path) -> Watch:
    """Two processes."""
    options = [f"--output={output}", f"--model={MODEL}", f"--prompt={prompt}", "--max-new-tokens=4", "--max-failures=1"]
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    command = [sys.executable, *launch, "--main_process_port=0", str(SCRIPT), "caption", *inputs, *options]
    with log.open("ab") as file:
        return Watch(output, psutil.Popen(command, env=ENVIRONMENT, stdout=file, stderr=file))


def count(output: Path) -> int:
    return sum(shard.read_bytes().count(b"\n") for shard in Journal(output).shards())


def problems(data: Data, output: Path) -> list[str]:
    """Everything that is wrong with the records of a run that ended."""
    found: list[str] = []
    for shard in Journal(output).shards():
        lines = shard.read_bytes().split(b"\n")
        if lines.pop():
            found.append(f"{shard.name} is torn")
        found += [f"{shard.name}: {line[:80]!r}" for line in lines if not _parses(line)]
    records = list(Journal(output).records())
    times = Counter((record.key, record.prompt) for record in records)
    wanted = {(key, prompt) for key in (*data.good, *data.bad) for prompt in PROMPTS}
    found += [f"missing: {name}" for name in wanted - times.keys()]
    found += [f"unknown: {name}" for name in times.keys() - wanted]
    found += [f"{number} times: {name}" for name, number in times.items() if number > 1]
    captions: dict[tuple[str, str], set[str | None]] = defaultdict(set)
    for record in records:
        if (record.status == "ok") != (record.key in data.good):
            found.append(f"{record.status}: {record.key}: {record.error}")
        elif record.status == "ok":
            captions[data.good[record.key], record.prompt].add(record.caption)
    found += [f"one picture, two captions: {texts}" for texts in captions.values() if len(texts) > 1]
    return found


def _parses(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def check_merge(data: Data, output: Path) -> list[str]:
    """Texts beside the pictures: by hand what was, and all others."""
    done = call("merge", output, data.top / "photos", "--max-failures=1")
    found = [f"changed: {path}" for path, text in data.texts.items() if path.read_bytes() != text]
    if data.texts and done.exit_code != 1:
        found.append(f"merge ended with {done.exit_code}: {done.output[-500:]}")
    texts = {path for folder in ("photos", "elsewhere") for path in (data.top / folder).rglob("*.txt")}
    pictures = {path for folder in ("photos", "elsewhere") for path in (data.top / folder).rglob("*.*")} - texts
    stems = {path.with_suffix("") for path in pictures}
    found += [f"beside no picture: {path}" for path in texts if path.with_suffix("") not in stems]
    written = len(texts) - len(data.texts)
    files = [key for key in data.good if key.startswith("photos/")]
    own = sum((data.top / key).with_suffix(".txt").resolve() in data.texts for key in files)
    if written != len(files) - own:
        found.append(f"{written} texts were written, {len(files) - own} were to be")
    return found


def soak(folder: Path, pictures: int, kills: int, seed: int) -> dict[str, Any]:
    """All of it; the figures, and under "problems" what is wrong."""
    chance, output = random.Random(seed), folder / "captions"
    folder.mkdir(parents=True)
    data = lay_out(folder.resolve() / "data", pictures, chance)
    begun, spelt, done, memory = time.monotonic(), spellings(data.top), 0, []
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
    megabytes = [{minute: used >> 20 for minute, used in sorted(each.items())} for each in memory]
    wrong = problems(data, output) + check_merge(data, output)
    return {
        "pictures": pictures,
        "damaged": len(data.bad),
        "by hand": len(data.texts),
        "kills": kills,
        "kills while captioning": done,
        "records": count(output),
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
    """Run it; exit with 1 if something is wrong."""
    figures = soak(folder, pictures, kills, seed)
    print(json.dumps(figures, indent=1, default=str))
    raise typer.Exit(bool(figures["problems"]))


if __name__ == "__main__":
    typer.run(main)
