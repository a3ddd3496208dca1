"""Time one long video in passes of several sizes, and measure its peak memory; then a video of a million rows.

    python benchmarks/max_rows.py --json build/max_rows.json      needs a CUDA device

Weights and pixels are random. Peak memory is beyond weights, pixels and outputs. The outputs of every size are compared
with those of one pass before anything is timed. `alone_ms` is the time of the passes as calls of their own. The
difference between `ms` and `alone_ms` is the time of copies to the outputs. The difference between `alone_ms` and one
pass is the price of products and attention over fewer rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from measuring import DEVICE, Row, measure_models, run_once, time_set_ups
from torch import nn

import hf_vit_accel
from hf_vit_accel.families.interface import named_tensors
from hf_vit_accel.options.passes import AUTO_ROWS, cut
from hf_vit_accel.tools.bench import build_tower, draw_pixels, largest_error

SIZES = (None, 16384, 28672, AUTO_ROWS, 50688, 65536)
"""The values of `max_rows`; None for one pass."""
HEIGHT = 36
WIDTH = 64
"""Patches of a frame's sides."""
FRAMES = 64
MILLION_FRAMES = 435
"""Frames of the video, and of the very long one."""
MILLION: Row = {}
"""The row of the very long video, which the first model encodes."""


def grid_of(frames: int) -> torch.Tensor:
    """Return the grid of one video."""
    return torch.tensor([(frames, HEIGHT, WIDTH)])


def draw_video(tower: nn.Module, frames: int) -> torch.Tensor:
    """Draw the random patches of a video."""
    return draw_pixels(tower, ((frames, HEIGHT, WIDTH),), 0)


def outputs_of(output: object) -> list[torch.Tensor]:
    """Return every tensor of an output."""
    return list(named_tensors(output).values())


def encode(tower: nn.Module, pixels: torch.Tensor, grid: torch.Tensor) -> tuple[Row, list[torch.Tensor]]:
    """Run a call once.

    Returns:
        Its seconds, the peak memory in GB beyond its outputs and the memory before it (None on a CPU), and the outputs.
    """
    call = run_once(partial(tower, pixels, grid_thw=grid))
    outputs = outputs_of(call.result)
    outputs_gb = sum(output.nbytes for output in outputs) / 1e9
    beyond_gb = None if call.beyond_gb is None else call.beyond_gb - outputs_gb
    return {"seconds": call.ms / 1e3, "beyond_gb": beyond_gb, "outputs_gb": outputs_gb}, outputs


def compare_sizes(model: str, tower: nn.Module, pixels: torch.Tensor, grid: torch.Tensor) -> list[Row]:
    """Return a row for every size of pass: memory, error and the frames of every pass.

    Raises:
        AssertionError: if the outputs differ by more than rounding
    """
    videos = tuple(tuple(video) for video in grid.tolist())
    rows: list[Row] = []
    expected: list[torch.Tensor] = []
    for size in SIZES:
        hf_vit_accel.patch(tower, max_rows=size, strict=True)
        tower(pixels, grid_thw=grid)  # computes the layout, whose memory is not a pass's
        call, outputs = encode(tower, pixels, grid)
        expected = expected or [output.clone() for output in outputs]
        row: Row = dict(model=model, max_rows=size, beyond_gb=call["beyond_gb"], error=largest_error(outputs, expected))
        del outputs
        passes = cut(videos, size or len(pixels))
        row["frames"] = [sum(t for t, _, _ in videos_of_pass) for videos_of_pass in passes]
        assert row["error"] < 1e-2, row
        rows.append(row)
    return rows


@torch.inference_mode()
def measure(model: str, rounds: int) -> list[Row]:
    """Return a row for every size of pass."""
    tower = build_tower(model, DEVICE, torch.bfloat16)
    pixels = draw_video(tower, FRAMES)
    rows = compare_sizes(model, tower, pixels, grid_of(FRAMES))

    def set_up(contender: tuple[int | None, int]) -> Callable[[], object]:
        max_rows, frames = contender
        hf_vit_accel.patch(tower, max_rows=max_rows)
        return partial(tower, pixels[: frames * HEIGHT * WIDTH], grid_thw=grid_of(frames))

    calls = [(row["max_rows"], FRAMES) for row in rows]
    passes_alone = {(None, frames) for row in rows for frames in row["frames"]}
    times = time_set_ups([*calls, *sorted(passes_alone - {*calls})], set_up, rounds, 1, warm_ups=1)
    for row in rows:
        row["ms"] = statistics.median(times[row["max_rows"], FRAMES])
        row["alone_ms"] = sum(statistics.median(times[None, frames]) for frames in row["frames"])
        print(row, flush=True)
    return rows


@torch.inference_mode()
def many(model: str, frames: int) -> Row:
    """Measure peak and seconds of two calls of a very long video with the default settings.

    Raises:
        AssertionError: if the last frames differ from a call of them alone
    """
    tower = build_tower(model, DEVICE, torch.bfloat16)
    grid = grid_of(frames)
    pixels = draw_video(tower, frames)
    hf_vit_accel.patch(tower, strict=True)
    calls: list[Row] = []
    for _ in range(2):
        call, outputs = encode(tower, pixels, grid)
        calls.append(call)
        ends = [output[-(len(output) // frames) * 3 :].clone() for output in outputs]
        del outputs
    row: Row = dict(model=model, rows=len(pixels), outputs_gb=calls[-1]["outputs_gb"])
    row |= {name: [call[name] for call in calls] for name in ("beyond_gb", "seconds")}
    last = outputs_of(tower(pixels[-3 * HEIGHT * WIDTH :], grid_thw=grid_of(3)))
    row["error"] = largest_error(ends, last)
    row["passes"] = hf_vit_accel.status(tower).towers[0].passes
    print(row, flush=True)
    assert row["error"] < 2e-2, row  # three frames get another backend: both round to bf16
    return row


def measure_model(model: str, rounds: int) -> list[Row]:
    """Return the rows of a model; with those of the first one also the very long video."""
    if not MILLION:
        MILLION.update(many(model, MILLION_FRAMES))
    return measure(model, rounds)


if __name__ == "__main__":
    fields = {"rows_of_call": FRAMES * HEIGHT * WIDTH, "million": MILLION}
    measure_models(__doc__, "qwen3-vl-8b,qwen2.5-vl-7b,qwen2-vl-7b", measure_model, options={"rounds": 5}, **fields)
