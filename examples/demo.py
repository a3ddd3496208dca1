"""Show stock beside patched, offline and in seconds: caption drawn scenes twice with a tiny trained model.

python examples/demo.py --output build/demo
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

import hf_vit_accel

SCENES = Path(__file__).resolve().parent / "scenes"
CHECKPOINT = SCENES.parents[1] / "tests" / "tiny_captioner" / "qwen2_5_vl"
MARKER = ".hf_vit_accel_demo"
"""An empty file that marks a folder as the demo's own."""
TOLERANCE = 1e-4
"""The largest relative L2 error of the tower's outputs in fp32."""
RUNS = 5
COLUMNS = 6
CELL = (224, 354)
"""Width and height of a picture with its captions on the contact sheet, in pixels."""
HEADER = 64
"""Height of the lines above the pictures."""


def inputs_of(images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """Return the inputs of the model, without its processor, which needs torchvision for the part for videos."""
    inputs = dict(AutoImageProcessor.from_pretrained(CHECKPOINT)(list(images), return_tensors="pt"))
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, padding_side="left")
    content = [{"type": "image"}, {"type": "text", "text": "describe this picture ."}]
    chat = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    counts = (inputs["image_grid_thw"].prod(1) // 4).tolist()  # a token stands for 2 x 2 patches
    texts = [text.replace("<|image_pad|>", "<|image_pad|>" * count) for count in counts]
    inputs |= tokenizer(texts, padding=True, return_tensors="pt")
    is_picture = inputs["input_ids"] == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return inputs | {"mm_token_type_ids": is_picture.int()}


def caption(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: object) -> list[str]:
    """Return a caption for every picture."""
    on_device = {name: value.to(model.device) for name, value in inputs.items()}
    tokens = model.generate(**on_device, max_new_tokens=24, **options)
    answers = tokens[:, inputs["input_ids"].shape[1] :]
    return AutoTokenizer.from_pretrained(CHECKPOINT).batch_decode(answers, skip_special_tokens=True)


@torch.inference_mode()
def compare_towers(stock: torch.nn.Module, patched: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Print the times of both towers; return the relative L2 error of the patched one in fp32."""
    pixels = inputs["pixel_values"].to(stock.device)
    grid = inputs["image_grid_thw"].to(stock.device)
    expected = stock(pixels, grid_thw=grid).pooler_output
    error = float((patched(pixels, grid_thw=grid).pooler_output - expected).norm() / expected.norm())
    if pixels.is_cuda:  # the fast paths of a GPU are for bf16; a CPU is quicker in fp32
        pixels = pixels.bfloat16()
        stock.bfloat16()
        patched.bfloat16()
    fastest = {stock: math.inf, patched: math.inf}
    for _ in range(RUNS):
        for tower in fastest:  # in turns: other programs slow down both alike
            start = time.perf_counter()
            tower(pixels, grid_thw=grid)
            if pixels.is_cuda:
                torch.cuda.synchronize()
            fastest[tower] = min(fastest[tower], 1000 * (time.perf_counter() - start))
    where = "for this tiny tower" if pixels.is_cuda else "(few runs on a CPU: noise, and no sign of a GPU's gain)"
    ratio = fastest[stock] / fastest[patched]
    print(f"  stock {fastest[stock]:.1f} ms, patched {fastest[patched]:.1f} ms: {ratio:.2f}x {where}")
    print(f"  relative L2 error of the patched tower in fp32: {error:.1e} (at most {TOLERANCE:.0e} is allowed)")
    return error


def contact_sheet(images: Sequence[Image.Image], expected: list[str], captions: dict[str, list[str]]) -> Image.Image:
    """Draw every picture above its stock and its patched caption: green where it is right, red where it is wrong."""
    rows = -(-len(images) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * CELL[0], HEADER + rows * CELL[1]), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((12, 20), "Captions of a tiny model, stock and patched", font=ImageFont.load_default(18), fill="black")
    for index, image in enumerate(images):
        x = index % COLUMNS * CELL[0]
        y = HEADER + index // COLUMNS * CELL[1]
        sheet.paste(image, (x + (CELL[0] - image.width) // 2, y + 8))
        for line, (way, texts) in enumerate(captions.items()):
            is_right = texts[index] == expected[index]
            text = f"{way}: {texts[index]}" + ("" if is_right else f" (is: {expected[index]})")
            wrapped = "\n".join(textwrap.wrap(text, 29)[:4])
            colour = (20, 130, 60) if is_right else (200, 30, 30)
            font = ImageFont.load_default(13)
            pen.multiline_text((x + 12, y + 214 + 68 * line), wrapped, font=font, fill=colour)
    return sheet


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit with 1 if too few captions are right, if outputs differ, or on a CPU if a caption differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/demo"))
    output = parser.parse_args(arguments).output
    if output.exists() and not (output.is_dir() and ((output / MARKER).exists() or not any(output.iterdir()))):
        parser.error(f"{output} is a file, or holds other files, which the demo would replace: name another folder")
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()

    rows = [json.loads(line) for line in (SCENES / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]
    images = [Image.open(SCENES / row["file_name"]).convert("RGB") for row in rows]
    expected = [row["text"] for row in rows]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.allow_tf32 = False  # convolutions use TF32 by default, and the stock tower has one
    model = AutoModelForImageTextToText.from_pretrained(CHECKPOINT, dtype=torch.float32).to(device).eval()
    inputs = inputs_of(images)
    stock = deepcopy(model.model.visual)

    captions = {}
    for step, way in enumerate(("stock", "patched"), start=1):
        print(f"\n--- {step} of 3: caption {len(images)} drawn scenes with the {way} tower (some seconds)", flush=True)
        options = {}
        if way == "patched":
            hf_vit_accel.patch(model)
            options["custom_generate"] = hf_vit_accel.graphed_decoding
        captions[way] = caption(model, inputs, **options)
    print(hf_vit_accel.status(model))
    print("\n--- 3 of 3: time the tower alone, stock and patched (some seconds)", flush=True)
    error = compare_towers(stock, model.model.visual, inputs)

    with (output / "captions.jsonl").open("w", encoding="utf-8") as file:
        for row, text in zip(rows, captions["patched"], strict=True):
            file.write(json.dumps({"file_name": row["file_name"], "text": text}) + "\n")
    contact_sheet(images, expected, captions).save(output / "contact_sheet.png")
    right = {way: sum(map(str.__eq__, texts, expected)) for way, texts in captions.items()}
    differing = sum(map(str.__ne__, *captions.values()))
    counts = ", ".join(f"{count} of {len(images)} {way}" for way, count in right.items())
    print(f"captions are exactly right: {counts}; {differing} differ between stock and patched")
    print(f"stock beside patched: {output / 'contact_sheet.png'}")
    if error > TOLERANCE or min(right.values()) < 0.9 * len(images) or (differing and device == "cpu"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
