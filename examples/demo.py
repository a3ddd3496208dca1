"""Shows the library at work, offline and in seconds: builds a tiny model, captions photographs, times its vision tower.

python examples/demo.py --output build/demo
"""

import time
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from batch_caption import Captioner, find_images, load_processor, read_image, write_records
from tiny_model import build
from transformers import AutoModelForImageTextToText

import hf_vit_accel

PHOTOGRAPHS = Path(__file__).parent / "images"
TOLERANCE = 1e-4  # largest relative L2 error of the tower's outputs, in fp32
RUNS = 7


@torch.inference_mode()
def run_tower(tower: torch.nn.Module, pixels: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
    """Gives all that the language model gets from the tower: the merged features and those of the deepstack layers."""
    outputs = tower(pixels, grid_thw=grid)
    return [outputs.pooler_output, *outputs.deepstack_features]


def milliseconds(tower: torch.nn.Module, pixels: torch.Tensor, grid: torch.Tensor) -> float:
    """Gives the median time of a forward of the tower, after two runs to warm up."""
    times = []
    for _ in range(2 + RUNS):
        start = time.perf_counter()
        run_tower(tower, pixels, grid)
        if pixels.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1000 * median(times[2:])


def main(
    output: Annotated[Path, typer.Option(help="Folder for the model and its captions.")] = Path("build/demo"),
) -> None:
    """Caption the example photographs with a tiny model. Exits with 1 if the patched tower's outputs differ."""
    on_cuda = torch.cuda.is_available()
    torch.backends.cudnn.allow_tf32 = False  # the stock tower holds a convolution, and those use TF32 by default
    model_folder = str(build(output / "model"))
    model = AutoModelForImageTextToText.from_pretrained(model_folder).to("cuda" if on_cuda else "cpu").eval()
    captioner = Captioner(model, load_processor(model_folder), max_new_tokens=12)
    files = find_images(PHOTOGRAPHS)
    inputs = captioner.encode([read_image(PHOTOGRAPHS / name) for name in files])
    tower, batch = model.model.visual, (inputs["pixel_values"], inputs["image_grid_thw"])

    stock_outputs = run_tower(tower, *batch)
    hf_vit_accel.patch(model)
    outputs = run_tower(tower, *batch)
    error = max(float((new - old).norm() / old.norm()) for new, old in zip(outputs, stock_outputs, strict=True))

    records = list(captioner.records(PHOTOGRAPHS, files))
    write_records(iter(records), output / "captions.jsonl")
    print("\nThe model is tiny and its weights are random, so a caption is only a row of words:\n")
    for record in records:
        print(f"{record.path:<16}{record.width:>5} x {record.height:<5}{record.caption or record.error}")

    # The fast paths of a GPU are for bf16; a CPU is quicker in fp32.
    model.to(torch.bfloat16 if on_cuda else torch.float32)
    patched_ms = milliseconds(tower, *batch)
    print(f"\n{hf_vit_accel.status(model)}\n")
    hf_vit_accel.unpatch(model)
    stock_ms = milliseconds(tower, *batch)

    device = torch.cuda.get_device_name() if on_cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"Tower, {len(files)} photographs, {len(batch[0])} patches, {model.dtype}, {device}, median of {RUNS} runs:")
    print(f"  stock {stock_ms:.1f} ms, patched {patched_ms:.1f} ms: {stock_ms / patched_ms:.2f}x for this tiny tower")
    print(f"  relative L2 error of the patched tower in fp32: {error:.1e} (at most {TOLERANCE:.0e} is allowed)")
    if error > TOLERANCE:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
