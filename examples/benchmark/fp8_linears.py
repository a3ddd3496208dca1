"""Whole towers with attention and linears in FP8: milliseconds, and how far features are from an fp32 run of stock.

    python examples/benchmark/fp8_linears.py --json build/fp8_linears.json      needs a GPU of capability 8.9 or newer

Weights and pixels are random. error: the largest relative L2 error of an output; cosine: the smallest of any row.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

import hf_vit_accel
from hf_vit_accel import Fp8Config, machine
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools.bench.towers import SIZES, build_tower, family_of_tower, weight_of
from hf_vit_accel.tools.bench.work import milliseconds

ALL = Fp8Config(linears=True, min_rows=0)
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "attention": {"fp8": True},
    "qkv proj": {"fp8": Fp8Config(attention=False, linears=("qkv", "proj"), min_rows=0)},
    "attention qkv proj": {"fp8": Fp8Config(linears=("qkv", "proj"), min_rows=0)},
    "mlp": {"fp8": Fp8Config(attention=False, linears=("mlp",), min_rows=0)},
    "all linears": {"fp8": Fp8Config(attention=False, linears=True, min_rows=0)},
    "all": {"fp8": ALL},
    "all, graphs": {"fp8": ALL, "cuda_graphs": True},
}
TIMED = ("16 x 512²", "one page", "one 1024²")


def measure(model: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each way and size."""
    device, found = torch.device("cuda"), []
    towers = {
        way: hf_vit_accel.patch(build_tower(model, device, torch.bfloat16), **wanted) for way, wanted in WAYS.items()
    }
    exact = build_tower(model, device, torch.float32)
    exact.load_state_dict(towers["bf16"].state_dict())
    tensors_of = family_of_tower(exact).tensors_of
    for size in TIMED:
        generator = torch.Generator(device).manual_seed(1)
        shape, grid = (rows_of(SIZES[size]), weight_of(exact)[0].numel()), torch.tensor(SIZES[size])
        pixels = torch.randn(shape, device=device, generator=generator).bfloat16()
        expected = tensors_of(exact(pixels.float(), grid_thw=grid.to(device)))
        steps = {way: lambda tower=tower: tower(pixels, grid_thw=grid) for way, tower in towers.items()}  # noqa: B023
        for step in steps.values():
            for _ in range(4):  # then a shape is captured
                step()
        outputs = {way: tensors_of(step()) for way, step in steps.items()}
        times: dict[str, list[float]] = {way: [] for way in steps}
        for index in range(rounds):
            for way in list(steps)[:: -1 if index % 2 else 1]:
                steps[way]()
                times[way].append(milliseconds(steps[way], cuda=True))
        for way, each in outputs.items():
            pairs = list(zip(each, expected, strict=True))
            row = dict(model=model, size=size, way=way, ms=statistics.median(times[way]))
            row["error"] = max(float((f.float() - e).norm() / e.norm()) for f, e in pairs)
            row["cosine"] = min(float(F.cosine_similarity(f.double(), e.double(), dim=-1).min()) for f, e in pairs)
            found.append(row)
            print(row, flush=True)
    return found


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "qwen3-vl-8b,qwen2.5-vl-7b,qwen2-vl-7b",
    rounds: int = 14,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and write what was found."""
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "dtype": "bfloat16",
        "versions": machine.versions(),
    }
    result["rows"] = []
    with torch.no_grad():
        for model in models.split(","):
            result["rows"] += measure(model, rounds)
            torch.cuda.empty_cache()
            if json_path is not None:
                json_path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    typer.run(main)
