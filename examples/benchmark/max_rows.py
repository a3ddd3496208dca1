"""One long video in passes of several sizes: time, and peak memory beyond weights, pixels and outputs.

    python examples/benchmark/max_rows.py --json build/max_rows.json      needs a CUDA device

Weights and pixels are random, and what each size of pass gives is compared with one pass before anything is timed.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import hf_vit_accel
from hf_vit_accel import env
from hf_vit_accel.bench.towers import build_tower, family_of_tower, weight_of
from hf_vit_accel.bench.work import milliseconds, outputs_of

SIZES = (None, 8192, 16384, 32768, 65536)


def measure(model: str, frames: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each size of pass, of a video of so many frames of 36 x 64 patches."""
    tower = build_tower(model, device, torch.bfloat16)
    grid = torch.tensor([(frames, 36, 64)])
    pixels = family_of_tower(tower).pixels(
        tower, torch.randn(int(grid.prod()), weight_of(tower)[0].numel(), device=device, dtype=torch.bfloat16)
    )
    rows: list[dict[str, Any]] = []
    expected: list[torch.Tensor] = []
    with torch.inference_mode():
        for size in SIZES:
            hf_vit_accel.patch(tower, max_rows=size, strict=True)
            tower(pixels, grid_thw=grid)  # lays out
            row: dict[str, Any] = {"model": model, "max_rows": size, "beyond_gb": None, "times": []}
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            output = tower(pixels, grid_thw=grid)
            if device.type == "cuda":
                held = output.last_hidden_state.nbytes + sum(each.nbytes for each in outputs_of(output))
                row["beyond_gb"] = (torch.cuda.max_memory_allocated() - before - held) / 1e9
            found = outputs_of(output)
            expected = expected or [each.clone() for each in found]
            off = [
                float((f.float() - e.float()).norm() / e.float().norm()) for f, e in zip(found, expected, strict=True)
            ]
            row["error"] = max(off)
            assert row["error"] < 1e-2, row
            rows.append(row)
            del output, found
        for index in range(rounds):
            for row in rows[:: -1 if index % 2 else 1]:
                hf_vit_accel.patch(tower, max_rows=row["max_rows"])
                tower(pixels, grid_thw=grid)
                cuda = device.type == "cuda"
                row["times"].append(milliseconds(lambda: tower(pixels, grid_thw=grid), cuda=cuda))
    for row in rows:
        row["ms"] = statistics.median(row.pop("times"))
        print(row, flush=True)
    return rows


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "qwen3-vl-8b,qwen2.5-vl-7b,qwen2-vl-7b",
    frames: int = 64,
    rounds: int = 6,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and write what was found."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    result |= {"dtype": "bfloat16", "versions": env.versions(), "rows_of_call": frames * 36 * 64, "rows": []}
    for model in models.split(","):
        result["rows"] += measure(model, frames, rounds, device)
        if json_path is not None:
            json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
