"""Time one long video in passes of several sizes, and measure its peak memory; then a video of a million rows.

    python benchmarks/max_rows.py --json build/max_rows.json      needs a CUDA device

Weights and pixels are random. Peak memory is beyond weights, pixels and outputs. The outputs of every size are compared
with those of one pass before anything is timed. `alone_ms` is the time of the passes as calls of their own. The
difference between `ms` and `alone_ms` is the time of copies to the outputs. The difference between `alone_ms` and one
pass is the price of products and attention over fewer rows.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from measuring import DEVICE, Row, document_of, largest_error, write_json
from torch import nn

import hf_vit_accel
from hf_vit_accel.options.passes import AUTO_ROWS, cut
from hf_vit_accel.tools.bench.timing import milliseconds
from hf_vit_accel.tools.bench.towers import build_tower, family_of_tower, weight_of

SIZES = (None, 16384, 28672, AUTO_ROWS, 50688, 65536)
"""The values of `max_rows`; None for one pass."""
HEIGHT = 36
WIDTH = 64
"""Patches of a frame's sides."""


def draw_pixels(tower: nn.Module, frames: int, device: torch.device) -> torch.Tensor:
    """Draw the random patches of a video."""
    pixels_of_patch = weight_of(tower)[0].numel()
    drawn = torch.randn(frames * HEIGHT * WIDTH, pixels_of_patch, device=device, dtype=torch.bfloat16)
    return family_of_tower(tower).pixels(tower, drawn)


def grid_of(frames: int) -> torch.Tensor:
    """Return the grid of one video."""
    return torch.tensor([(frames, HEIGHT, WIDTH)])


def outputs_of(tower: nn.Module, output: object) -> list[torch.Tensor]:
    """Return every tensor of an output."""
    return list(family_of_tower(tower).tensors_of(output))


def gigabytes(tower: nn.Module, pixels: torch.Tensor, grid: torch.Tensor) -> tuple[float | None, list[torch.Tensor]]:
    """Measure the peak memory of a call beyond its outputs and the memory before it.

    Returns:
        The gigabytes, None on a CPU, and the outputs.
    """
    if pixels.device.type != "cuda":
        return None, outputs_of(tower, tower(pixels, grid_thw=grid))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = tower(pixels, grid_thw=grid)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()  # before `outputs_of`, which may allocate
    tensors = outputs_of(tower, output)
    return (peak - before - sum(tensor.nbytes for tensor in tensors)) / 1e9, tensors


def compare_sizes(model: str, tower: nn.Module, pixels: torch.Tensor, grid: torch.Tensor) -> list[Row]:
    """Return a row for every size of pass: memory, error and the frames of every pass.

    Raises:
        AssertionError: if the outputs differ by more than rounding
    """
    clips = family_of_tower(tower).geometry(tower).clips
    videos = tuple(tuple(video) for video in grid.tolist())
    rows: list[Row] = []
    expected: list[torch.Tensor] = []
    for size in SIZES:
        hf_vit_accel.patch(tower, max_rows=size, strict=True)
        tower(pixels, grid_thw=grid)  # computes the layout, whose memory is not a pass's
        beyond, outputs = gigabytes(tower, pixels, grid)
        expected = expected or [output.clone() for output in outputs]
        row: Row = dict(model=model, max_rows=size, beyond_gb=beyond, error=largest_error(outputs, expected))
        del outputs
        passes = cut(videos, size or len(pixels), clips=clips)
        row["frames"] = [sum(t for t, _, _ in videos_of_pass) for videos_of_pass in passes]
        assert row["error"] < 1e-2, row
        rows.append(row)
    return rows


@torch.inference_mode()
def measure(model: str, frames: int, rounds: int, device: torch.device) -> list[Row]:
    """Return a row for every size of pass."""
    tower = build_tower(model, device, torch.bfloat16)
    grid = grid_of(frames)
    pixels = draw_pixels(tower, frames, device)
    rows = compare_sizes(model, tower, pixels, grid)
    times: list[list[float]] = [[] for _ in rows]
    lengths = {frames_of_pass for row in rows for frames_of_pass in row["frames"]}
    alone: dict[int, list[float]] = {length: [] for length in lengths}
    for index in range(rounds):
        order = list(zip(rows, times, strict=True))
        for row, of_row in order[:: -1 if index % 2 else 1]:
            hf_vit_accel.patch(tower, max_rows=row["max_rows"])
            of_row.append(_milliseconds_of_second_call(tower, pixels, grid))
        hf_vit_accel.patch(tower, max_rows=None)
        for length in lengths:
            clip = pixels[: length * HEIGHT * WIDTH]
            alone[length].append(_milliseconds_of_second_call(tower, clip, grid_of(length)))
    for row, of_row in zip(rows, times, strict=True):
        row["ms"] = statistics.median(of_row)
        row["alone_ms"] = sum(statistics.median(alone[length]) for length in row["frames"])
        print(row, flush=True)
    return rows


def _milliseconds_of_second_call(tower: nn.Module, pixels: torch.Tensor, grid: torch.Tensor) -> float:
    tower(pixels, grid_thw=grid)
    return milliseconds(lambda: tower(pixels, grid_thw=grid), cuda=pixels.is_cuda)


@torch.inference_mode()
def many(model: str, frames: int, device: torch.device) -> Row:
    """Measure peak and seconds of two calls of a very long video with the default settings.

    Raises:
        AssertionError: if the last frames differ from a call of them alone
    """
    tower = build_tower(model, device, torch.bfloat16)
    grid = grid_of(frames)
    pixels = draw_pixels(tower, frames, device)
    hf_vit_accel.patch(tower, strict=True)
    row: Row = dict(model=model, rows=len(pixels), beyond_gb=[], seconds=[])
    for _ in range(2):
        begin = time.perf_counter()
        beyond, outputs = gigabytes(tower, pixels, grid)
        row["seconds"].append(time.perf_counter() - begin)
        row["beyond_gb"].append(beyond)
        row["outputs_gb"] = sum(output.nbytes for output in outputs) / 1e9
        ends = [output[-(len(output) // frames) * 3 :].clone() for output in outputs]
        del outputs
    last = outputs_of(tower, tower(pixels[-3 * HEIGHT * WIDTH :], grid_thw=grid_of(3)))
    row["error"] = largest_error(ends, last)
    row["passes"] = hf_vit_accel.status(tower).towers[0].passes
    print(row, flush=True)
    assert row["error"] < 2e-2, row  # three frames get another backend: both round to bf16
    return row


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "qwen3-vl-8b,qwen2.5-vl-7b,qwen2-vl-7b",
    frames: int = 64,
    rounds: int = 5,
    million: Annotated[int, typer.Option(help="Frames of the very long video of the first model; 0 for none.")] = 435,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON object to this file.")] = None,
) -> None:
    """Measure every model, and print and write the rows."""
    rows: list[Row] = []
    document = document_of(rows, rows_of_call=frames * HEIGHT * WIDTH)
    names = models.split(",")
    if million:
        document["million"] = many(names[0], million, DEVICE)
    for model in names:
        rows += measure(model, frames, rounds, DEVICE)
        write_json(json_path, document)


if __name__ == "__main__":
    typer.run(main)
