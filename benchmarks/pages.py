"""Time a loop over pages as people write it: read a JPEG, run the processor, move the inputs, run the model.

    python benchmarks/pages.py --models qwen2.5-vl-7b,qwen3-vl-8b --json benchmarks/pages.json

One process, a page of 1700x2200 at a time, a patched full-size model of random weights. Ways differ in where the file
is decoded, and where the processor runs. All read the same files; each page counts, from the file to the logits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from captioning_benchmark import CHECKPOINTS, load_model, load_processor
from measuring import DEVICE, DTYPE, Row, measure_models, time_rows
from PIL import Image

import hf_vit_accel

WIDTH, HEIGHT = 1700, 2200
PAGES = 4
TEXT = "<|vision_start|><|image_pad|><|vision_end|>describe this picture ."
Open = Callable[[str], Any]


def with_pillow(path: str) -> Image.Image:
    """Decode a page on the CPU."""
    return Image.open(path).convert("RGB")


def with_torchvision(path: str, device: str) -> torch.Tensor:
    """Decode a page on a device."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    return decode_jpeg(read_file(path), mode=ImageReadMode.RGB, device=device)


def draw(folder: Path) -> list[str]:
    """Write pages of coarse noise."""
    paths = []
    for index in range(PAGES):
        coarse = np.random.default_rng(index).integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8)
        paths.append(str(folder / f"{index}.jpg"))
        Image.fromarray(coarse).resize((WIDTH, HEIGHT)).save(paths[-1], quality=85)
    return paths


@torch.inference_mode()
def run(model: Any, processor: Any, path: str, open_page: Open, device: str | None) -> torch.Tensor:
    """Return the last logits about a page."""
    placement = {} if device is None else {"device": device}
    inputs = processor(text=[TEXT], images=[open_page(path)], return_tensors="pt", **placement)
    inputs = inputs.to(DEVICE)
    logits: torch.Tensor = model(**inputs, logits_to_keep=1).logits
    return logits


def time_ways(
    model: Any, processor: Any, paths: list[str], ways: dict[str, tuple[Open, str | None]], rounds: int, name: str
) -> list[Row]:
    """Time ways in turns, each on another page at every call."""
    turn = iter(range(1 << 30))

    def step(open_page: Open, device: str | None) -> torch.Tensor:
        return run(model, processor, paths[next(turn) % PAGES], open_page, device)

    steps = {way: partial(step, *of_way) for way, of_way in ways.items()}
    for warm_up in [*steps.values()] * 3:
        warm_up()
    return time_rows(steps, rounds, model=name, size=f"{WIDTH}x{HEIGHT}")


def measure(name: str, rounds: int) -> list[Row]:
    """Time every way of one model, in turns."""
    checkpoint = str(CHECKPOINTS[name])
    model = load_model(checkpoint, DTYPE, DEVICE)
    gpu = str(DEVICE)
    on_gpu = partial(with_torchvision, device=gpu)
    ways: dict[str, tuple[Open, str | None]] = {
        "Pillow, processor on the CPU": (with_pillow, None),
        'Pillow, processor(device="cuda")': (with_pillow, gpu),
        'torchvision on the CPU, processor(device="cuda")': (partial(with_torchvision, device="cpu"), gpu),
        'torchvision on the GPU, processor(device="cuda")': (on_gpu, gpu),
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        paths = draw(Path(folder))
        processor = load_processor(checkpoint)
        rows += time_ways(hf_vit_accel.patch(model), processor, paths, ways, rounds, name)
        patched = hf_vit_accel.patch(model, processor=processor)
        of_bytes = {'torchvision on the GPU, patch(processor=), processor(device="cuda")': (on_gpu, gpu)}
        rows += time_ways(patched, processor, paths, of_bytes, rounds, name)
    hf_vit_accel.unpatch(model)
    return rows


if __name__ == "__main__":
    measure_models(__doc__, ",".join(CHECKPOINTS), measure)
