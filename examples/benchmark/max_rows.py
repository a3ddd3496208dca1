"""One long video in passes of several sizes: time, and peak memory beyond weights, pixels and outputs; a million rows.

    python examples/benchmark/max_rows.py --json build/max_rows.json      needs a CUDA device

Weights and pixels are random, and what each size of pass gives is compared with one pass before anything is timed.
`alone_ms` is what the passes take one by one, as calls of their own: what `ms` is above that, copies to the outputs
take, and what it is above one pass, products and attention over fewer rows.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import hf_vit_accel
from hf_vit_accel import machine
from hf_vit_accel.engine.passes import FREE, cut
from hf_vit_accel.tools.bench.towers import build_tower, family_of_tower, weight_of
from hf_vit_accel.tools.bench.work import milliseconds

SIZES = (None, 16384, 28672, FREE, 50688, 65536)
HEIGHT, WIDTH = 36, 64


def pixels_of(tower: Any, frames: int, device: torch.device) -> torch.Tensor:
    """Random patches of a video."""
    wide = weight_of(tower)[0].numel()
    drawn = torch.randn(frames * HEIGHT * WIDTH, wide, device=device, dtype=torch.bfloat16)
    return family_of_tower(tower).pixels(tower, drawn)


def flat(tower: Any, output: Any) -> list[torch.Tensor]:
    """Every output."""
    return list(family_of_tower(tower).tensors_of(output))


def gigabytes(tower: Any, pixels: torch.Tensor, grid: torch.Tensor) -> tuple[float | None, list[torch.Tensor]]:
    """Peak of a call beyond what was there and its outputs; None on a CPU. The peak is read before all else."""
    if pixels.device.type != "cuda":
        return None, flat(tower, tower(pixels, grid_thw=grid))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = tower(pixels, grid_thw=grid)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    found = flat(tower, output)
    return (peak - before - sum(each.nbytes for each in found)) / 1e9, found


def measure(model: str, frames: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each size of pass, of a video of so many frames."""
    tower = build_tower(model, device, torch.bfloat16)
    grid, cuda = torch.tensor([(frames, HEIGHT, WIDTH)]), device.type == "cuda"
    pixels, clips = pixels_of(tower, frames, device), family_of_tower(tower).geometry(tower).clips
    rows: list[dict[str, Any]] = []
    expected: list[torch.Tensor] = []
    with torch.inference_mode():
        for size in SIZES:
            hf_vit_accel.patch(tower, max_rows=size, strict=True)
            tower(pixels, grid_thw=grid)  # lays out
            beyond, found = gigabytes(tower, pixels, grid)
            expected = expected or [each.clone() for each in found]
            off = max(
                float((f.float() - e.float()).norm() / e.float().norm()) for f, e in zip(found, expected, strict=True)
            )
            passes = cut(tuple(map(tuple, grid.tolist())), size or len(pixels), clips=clips)
            row = dict(model=model, max_rows=size, beyond_gb=beyond, error=off, times=[], alone=[])
            rows.append(row | dict(frames=[sum(t for t, _, _ in each) for each in passes]))
            assert off < 1e-2, row
            del found
        lengths = {each for row in rows for each in row["frames"]}
        alone: dict[int, list[float]] = {each: [] for each in lengths}
        for index in range(rounds):
            for row in rows[:: -1 if index % 2 else 1]:
                hf_vit_accel.patch(tower, max_rows=row["max_rows"])
                tower(pixels, grid_thw=grid)
                row["times"].append(milliseconds(lambda: tower(pixels, grid_thw=grid), cuda=cuda))
            hf_vit_accel.patch(tower, max_rows=None)
            for each in lengths:
                some, of = pixels[: each * HEIGHT * WIDTH], torch.tensor([(each, HEIGHT, WIDTH)])
                tower(some, grid_thw=of)
                alone[each].append(milliseconds(lambda: tower(some, grid_thw=of), cuda=cuda))  # noqa: B023
    for row in rows:
        row["ms"] = statistics.median(row.pop("times"))
        row["alone_ms"] = sum(statistics.median(alone[each]) for each in row["frames"])
        del row["alone"]
        print(row, flush=True)
    return rows


def many(model: str, frames: int, device: torch.device) -> dict[str, Any]:
    """A very long video with the default settings: peak of the first call and of the second, and their seconds.

    Its last frames are compared with a call of them alone.
    """
    tower, grid = build_tower(model, device, torch.bfloat16), torch.tensor([(frames, HEIGHT, WIDTH)])
    pixels = pixels_of(tower, frames, device)
    hf_vit_accel.patch(tower, strict=True)
    row: dict[str, Any] = dict(model=model, rows=len(pixels), beyond_gb=[], seconds=[])
    with torch.inference_mode():
        for _ in range(2):
            begin = time.perf_counter()
            beyond, found = gigabytes(tower, pixels, grid)
            row["seconds"].append(time.perf_counter() - begin)
            row["beyond_gb"].append(beyond)
            row["outputs_gb"] = sum(each.nbytes for each in found) / 1e9
            ends = [each[-(len(each) // frames) * 3 :].clone() for each in found]
            del found
        last = flat(tower, tower(pixels[-3 * HEIGHT * WIDTH :], grid_thw=torch.tensor([(3, HEIGHT, WIDTH)])))
        pairs = zip(ends, last, strict=True)
        row["error"] = max(float((f.float() - e.float()).norm() / e.float().norm()) for f, e in pairs)
    row["passes"] = hf_vit_accel.status(tower).towers[0].passes
    print(row, flush=True)
    assert row["error"] < 2e-2, row  # for three frames another backend attends: two roundings to bf16 apart
    return row


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "qwen3-vl-8b,qwen2.5-vl-7b,qwen2-vl-7b",
    frames: int = 64,
    rounds: int = 5,
    million: Annotated[int, typer.Option(help="Frames of the very long video of the first model; 0 for none.")] = 435,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and write what was found."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    result |= {"dtype": "bfloat16", "versions": machine.versions(), "rows_of_call": frames * HEIGHT * WIDTH, "rows": []}
    names = models.split(",")
    if million:
        result["million"] = many(names[0], million, device)
    for model in names:
        result["rows"] += measure(model, frames, rounds, device)
        if json_path is not None:
            json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
