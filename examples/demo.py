"""Show stock beside patched, offline and in seconds: draw scenes and caption them twice with a tiny trained model.

python examples/demo.py --output build/demo
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from media.processors import load_processor
from PIL import Image, ImageDraw, ImageFont
from transformers import AutoModelForImageTextToText

import hf_vit_accel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from tiny_captioner.scenes import draw, scene

CAPTIONER = Path(__file__).resolve().parent / "batch_caption.py"
CHECKPOINTS = Path(__file__).resolve().parents[1] / "tests" / "tiny_captioner"
FIRST = 1 << 41
"""The first seed of the demo's scenes; the models were neither trained nor evaluated on them."""
MARKER = ".hf_vit_accel_demo"
"""An empty file that marks a folder as the demo's own."""
TOLERANCE = 1e-4
"""The largest relative L2 error of the tower's outputs in fp32."""
RUNS = 9
CELL = (224, 354)
"""Width and height of a picture with its captions on the contact sheet, in pixels."""
HEADER = 64
"""Height of the lines above the pictures."""
PICTURE = 200
COLUMNS = 6
Record = dict[str, Any]
"""A line of the merged captions."""
GREEN = (20, 130, 60)
RED = (200, 30, 30)


def say(line: str) -> None:
    """Print what happens next, before it happens."""
    print(f"\n--- {line}", flush=True)


def draw_scenes(folder: Path, count: int, unit: int) -> dict[str, str]:
    """Draw pictures of several sizes; return their captions by file name. Other files of the folder stay."""
    folder.mkdir(parents=True, exist_ok=True)
    captions = {}
    for index in range(count):
        drawn = scene(FIRST + index, video=False)
        chance = random.Random(index)
        name = f"scene_{index:02d}.png"
        draw(drawn, unit * chance.randint(4, 7), unit * chance.randint(4, 7))[0].save(folder / name)
        captions[name] = drawn.caption
    return captions


def run_captioner(*arguments: str) -> None:
    """Run `batch_caption.py` in a process of its own. Exits as it does if it fails."""
    completed = subprocess.run([sys.executable, str(CAPTIONER), *arguments])
    if completed.returncode:
        raise typer.Exit(completed.returncode)


def contact_sheet(
    folder: Path, records_by_way: dict[str, list[Record]], expected: dict[str, str], header: list[str]
) -> Image.Image:
    """Draw every picture above its stock and its patched caption, ticked or crossed.

    Args:
        folder: The pictures.
        records_by_way: The records of both ways, in the same order.
        expected: The right captions, by file name. One that both ways miss stands below them.
        header: Lines above the pictures.
    """
    names = [record["key"] for record in next(iter(records_by_way.values()))]
    rows = -(-len(names) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * CELL[0], HEADER + rows * CELL[1]), "white")
    pen = ImageDraw.Draw(sheet)
    pen.multiline_text((12, 10), "\n".join(header), font=ImageFont.load_default(18), fill="black")
    for index, name in enumerate(names):
        x = index % COLUMNS * CELL[0]
        y = HEADER + index // COLUMNS * CELL[1]
        picture = Image.open(folder / name)
        picture.thumbnail((PICTURE, PICTURE))
        sheet.paste(picture, (x + (CELL[0] - picture.width) // 2, y + 8 + (PICTURE - picture.height) // 2))
        for line, (way, records) in enumerate(records_by_way.items()):
            _write_caption(pen, (x + 12, y + 214 + 68 * line), way, records[index], expected[name])
    return sheet


def _write_caption(pen: ImageDraw.ImageDraw, corner: tuple[int, int], way: str, record: Record, expected: str) -> None:
    """Write the caption of one way beside a tick or a cross; a wrong one is followed by the right one."""
    x, y = corner
    text = f"{way}: {record['caption'] or record['error']}"
    if record["caption"] == expected:
        colour = GREEN
        pen.line([(x, y + 10), (x + 4, y + 16), (x + 12, y + 2)], fill=colour, width=3)
    else:
        colour = RED
        text += f" (is: {expected})"
        pen.line([(x, y + 2), (x + 12, y + 16)], fill=colour, width=3)
        pen.line([(x + 12, y + 2), (x, y + 16)], fill=colour, width=3)
    font = ImageFont.load_default(13)
    pen.multiline_text((x + 20, y), "\n".join(textwrap.wrap(text, 27)[:4]), font=font, fill=colour)


@torch.inference_mode()
def run_tower(tower: torch.nn.Module, pixels: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that the language model takes from the tower: merged features and deepstack features."""
    outputs = tower(pixels, grid_thw=grid)
    return [outputs.pooler_output, *(outputs.get("deepstack_features") or [])]


def milliseconds(towers: Sequence[torch.nn.Module], pixels: torch.Tensor, grid: torch.Tensor) -> list[float]:
    """Return the time of the fastest forward of every tower. They run in turns: other programs slow down all alike."""
    fastest = [math.inf] * len(towers)
    for _ in range(RUNS):
        for index, tower in enumerate(towers):
            start = time.perf_counter()
            run_tower(tower, pixels, grid)
            if pixels.is_cuda:
                torch.cuda.synchronize()
            fastest[index] = min(fastest[index], 1000 * (time.perf_counter() - start))
    return fastest


@dataclass(frozen=True)
class Comparison:
    """A tower stock and patched on the same pictures.

    Attributes:
        stock_ms: Time of the stock tower's fastest forward.
        patched_ms: Time of the patched tower's fastest forward.
        error: Relative L2 error of the patched tower's outputs in fp32.
        on_cuda: Whether a GPU ran them.
        conditions: What was timed, for the console.
    """

    stock_ms: float
    patched_ms: float
    error: float
    on_cuda: bool
    conditions: str

    def __str__(self) -> str:
        ratio = self.stock_ms / self.patched_ms
        where = "for this tiny tower" if self.on_cuda else "(few runs on a CPU: noise, and no sign of a GPU's gain)"
        return f"stock {self.stock_ms:.1f} ms, patched {self.patched_ms:.1f} ms: {ratio:.2f}x {where}"


def compare(folder: Path, names: list[str], checkpoint: Path) -> Comparison:
    """Run a tower stock and patched on the pictures: compare the outputs in fp32, and time both."""
    on_cuda = torch.cuda.is_available()
    torch.backends.cudnn.allow_tf32 = False  # convolutions use TF32 by default, and the stock tower has one
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    processor = load_processor(str(checkpoint))
    inputs = processor.image_processor([Image.open(folder / name) for name in names], return_tensors="pt")
    device = torch.device("cuda" if on_cuda else "cpu")
    stock = model.model.visual.to(device)
    pixels = inputs["pixel_values"].to(device)
    grid = inputs["image_grid_thw"].to(device)
    patched = hf_vit_accel.patch(deepcopy(stock))
    expected = run_tower(stock, pixels, grid)
    outputs = run_tower(patched, pixels, grid)
    error = max(float((new - old).norm() / old.norm()) for new, old in zip(outputs, expected, strict=True))
    if on_cuda:  # the fast paths of a GPU are for bf16; a CPU is quicker in fp32
        stock.bfloat16()
        patched.bfloat16()
        pixels = pixels.bfloat16()
    stock_ms, patched_ms = milliseconds([stock, patched], pixels, grid)
    machine = torch.cuda.get_device_name() if on_cuda else f"CPU, {torch.get_num_threads()} threads"
    dtype = str(pixels.dtype).removeprefix("torch.")
    conditions = f"{len(names)} pictures, {len(pixels)} patches, {dtype}, {machine}, fastest of {RUNS} runs in turns"
    return Comparison(stock_ms, patched_ms, error, on_cuda, conditions)


def caption(way: str, scenes: Iterable[Path], output: Path, checkpoint: Path) -> list[Record]:
    """Caption scenes with the stock or the patched tower, and return the records."""
    records_folder = output / "records" / way
    shutil.rmtree(records_folder, ignore_errors=True)
    merged = output / ("captions.jsonl" if way == "patched" else f"captions_{way}.jsonl")
    options = ["--prompt", "describe this {kind} .", "--max-new-tokens", "24", "--model", str(checkpoint)]
    options += ["--no-patch"] if way == "stock" else []
    run_captioner("caption", *(str(path) for path in scenes), "--output", str(records_folder), *options)
    run_captioner("merge", str(records_folder), str(merged), "--overwrite")
    return [json.loads(line) for line in merged.read_text(encoding="utf-8").splitlines()]


def main(
    output: Annotated[Path, typer.Option(help="Folder for scenes, captions and contact sheet.")] = Path("build/demo"),
    family: Annotated[
        Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"], typer.Option(help="The family of the tiny model.")
    ] = "qwen2_5_vl",
    scenes: Annotated[int, typer.Option(min=1)] = 24,
) -> None:
    """Caption drawn scenes, stock and patched, and compare.

    Exits with 1 if too few captions are right, or if the patched tower's outputs differ; on a CPU also if a caption
    differs.
    """
    checkpoint = CHECKPOINTS / family
    folder = output / "scenes"
    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"{output} is a file: name a folder", param_hint="--output")
    marker = output / MARKER
    if not marker.exists() and output.is_dir() and any(output.iterdir()):
        raise typer.BadParameter(f"{output} holds other files, which the demo would replace: name another folder")
    output.mkdir(parents=True, exist_ok=True)
    marker.touch()
    say(f"1 of 4: draw {scenes} scenes into {folder} (a second)")
    expected = draw_scenes(folder, scenes, unit=32 if family == "qwen3_vl" else 28)
    records_by_way = {}
    right = {}
    for step, way in enumerate(("stock", "patched"), start=2):
        say(f"{step} of 4: caption them with the {way} tower (some 10 to 20 s, mostly the start: step 4 compares)")
        records_by_way[way] = caption(way, [folder / name for name in expected], output, checkpoint)
        right[way] = sum(record["caption"] == expected[record["key"]] for record in records_by_way[way])
    say("4 of 4: time the tower alone, stock and patched (some seconds)")
    comparison = compare(folder, list(expected), checkpoint)
    pairs = zip(records_by_way["stock"], records_by_way["patched"], strict=True)
    differing = sum(stock["caption"] != patched["caption"] for stock, patched in pairs)
    counts = ", ".join(f"{count} of {scenes} {way}" for way, count in right.items())
    captions_line = f"captions are exactly right: {counts}; {differing} differ between stock and patched"
    header = [f"tower: {comparison}", captions_line]
    contact_sheet(folder, records_by_way, expected, header).save(output / "contact_sheet.png")
    print(f"\ntower, {comparison.conditions}:\n  {comparison}")
    print(
        f"  relative L2 error of the patched tower in fp32: {comparison.error:.1e} (at most {TOLERANCE:.0e} is allowed)"
    )
    print(f"{captions_line}\nstock beside patched: {output / 'contact_sheet.png'}")
    is_different = differing > 0 and not torch.cuda.is_available()
    if comparison.error > TOLERANCE or min(right.values()) < 0.9 * scenes or is_different:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
