"""Show the library at work, offline and in seconds: draw scenes and caption them with a tiny trained model.

python examples/demo.py --output build/demo
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import textwrap
import time
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from media.processors import load_processor
from PIL import Image, ImageDraw, ImageFont
from tiny_captioner.scenes import draw, scene
from transformers import AutoModelForImageTextToText

import hf_vit_accel

CAPTIONER = Path(__file__).resolve().parent / "batch_caption.py"
CHECKPOINTS = Path(__file__).resolve().parent / "tiny_captioner"
FIRST = 1 << 41
"""The first seed of the demo's scenes; the models were neither trained nor evaluated on them."""
TOLERANCE = 1e-4
"""The largest relative L2 error of the tower's outputs in fp32."""
RUNS = 7
CELL = (224, 292)
"""Width and height of a picture with its caption on the contact sheet, in pixels."""
PICTURE = 200
COLUMNS = 6
GREEN = (20, 130, 60)
RED = (200, 30, 30)


def draw_scenes(folder: Path, count: int, unit: int) -> dict[str, str]:
    """Draw pictures of several sizes; return their captions by file name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
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


def contact_sheet(folder: Path, records: list[dict[str, Any]], expected: dict[str, str]) -> Image.Image:
    """Draw every picture above its caption, ticked or crossed; a wrong caption is followed by the right one."""
    rows = -(-len(records) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * CELL[0], rows * CELL[1]), "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(13)
    for index, record in enumerate(records):
        x = index % COLUMNS * CELL[0]
        y = index // COLUMNS * CELL[1]
        picture = Image.open(folder / record["key"])
        picture.thumbnail((PICTURE, PICTURE))
        sheet.paste(picture, (x + (CELL[0] - picture.width) // 2, y + 8 + (PICTURE - picture.height) // 2))
        text = record["caption"] or str(record["error"])
        if record["caption"] == expected[record["key"]]:
            colour = GREEN
            pen.line([(x + 12, y + 224), (x + 16, y + 230), (x + 24, y + 216)], fill=colour, width=3)
        else:
            colour = RED
            text += f" (is: {expected[record['key']]})"
            pen.line([(x + 12, y + 216), (x + 24, y + 230)], fill=colour, width=3)
            pen.line([(x + 24, y + 216), (x + 12, y + 230)], fill=colour, width=3)
        pen.multiline_text((x + 32, y + 214), "\n".join(textwrap.wrap(text, 27)[:5]), font=font, fill=colour)
    return sheet


@torch.inference_mode()
def run_tower(tower: torch.nn.Module, pixels: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that the language model takes from the tower: merged features and deepstack features."""
    outputs = tower(pixels, grid_thw=grid)
    return [outputs.pooler_output, *(outputs.get("deepstack_features") or [])]


def milliseconds(tower: torch.nn.Module, pixels: torch.Tensor, grid: torch.Tensor) -> float:
    """Return the median time of a forward of the tower, after two runs that warm up."""
    times = []
    for _ in range(2 + RUNS):
        start = time.perf_counter()
        run_tower(tower, pixels, grid)
        if pixels.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1000 * median(times[2:])


def compare(folder: Path, names: list[str], checkpoint: Path) -> float:
    """Run a tower stock and patched on the pictures, print both times and the error, and return the error."""
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
    stock_ms = milliseconds(stock, pixels, grid)
    patched_ms = milliseconds(patched, pixels, grid)
    machine = torch.cuda.get_device_name() if on_cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"Tower, {len(names)} pictures, {len(pixels)} patches, {pixels.dtype}, {machine}, median of {RUNS} runs:")
    print(f"  stock {stock_ms:.1f} ms, patched {patched_ms:.1f} ms: {stock_ms / patched_ms:.2f}x for this tiny tower")
    print(f"  relative L2 error of the patched tower in fp32: {error:.1e} (at most {TOLERANCE:.0e} is allowed)")
    return error


def main(
    output: Annotated[Path, typer.Option(help="Folder for scenes, captions and contact sheet.")] = Path("build/demo"),
    family: Annotated[str, typer.Option(help="qwen2_vl, qwen2_5_vl or qwen3_vl.")] = "qwen2_5_vl",
    scenes: Annotated[int, typer.Option(min=1)] = 24,
) -> None:
    """Caption drawn scenes. Exits with 1 if too few captions are right, or if the patched tower's outputs differ."""
    checkpoint = CHECKPOINTS / family
    folder = output / "scenes"
    records_folder = output / "records"
    if not records_folder.is_dir() and output.is_dir() and any(output.iterdir()):
        raise typer.BadParameter(f"{output} holds other files, which the demo would replace: name another folder")
    records_folder.mkdir(parents=True, exist_ok=True)
    expected = draw_scenes(folder, scenes, unit=32 if family == "qwen3_vl" else 28)
    arguments = ["caption", str(folder), "--output", str(records_folder), "--model", str(checkpoint)]
    options = ["--prompt", "describe this {kind} .", "--max-new-tokens", "24", "--overwrite"]
    run_captioner(*arguments, *options)
    run_captioner("merge", str(records_folder), str(output / "captions.jsonl"), "--overwrite")
    records = [json.loads(line) for line in (output / "captions.jsonl").read_text(encoding="utf-8").splitlines()]
    contact_sheet(folder, records, expected).save(output / "contact_sheet.png")
    right = sum(record["caption"] == expected[record["key"]] for record in records)
    print(f"\n{right} of {len(expected)} captions are exactly right: {output / 'contact_sheet.png'}\n")
    error = compare(folder, list(expected), checkpoint)
    if error > TOLERANCE or right < 0.9 * len(expected):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
