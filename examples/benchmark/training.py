"""Forward and backward of whole towers, every parameter trained: gradients compared with fp32, then timed beside stock.

    python examples/benchmark/training.py [training.json]

Random weights in the models' real shapes, bf16, medians of interleaved rounds; peak memory beside weights.
"""

from __future__ import annotations

import json
import statistics
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

import hf_vit_accel
from hf_vit_accel import env
from hf_vit_accel.bench.towers import PEAK, SIZES, build_tower, matrix_flops

MODELS = "qwen3-vl-8b", "qwen2.5-vl-7b", "qwen2-vl-7b"
INPUTS = "one 448²", "one 1024²", "16 x 512²", "one page"
COMPARED = "one 1024²"  # where gradients are compared: stock in fp32 needs four times the memory
ROUNDS, TIMED = 3, 4
STOCK_LIMIT = 5000  # patches above which stock Qwen2.5-VL, of one call per window, is not timed: over a second each


def outputs_of(output: Any) -> list[torch.Tensor]:
    return [output.last_hidden_state, output.pooler_output, *(output.get("deepstack_features") or ())]


def step(tower: Any, pixels: torch.Tensor, grid: torch.Tensor, incoming: list[torch.Tensor]) -> None:
    """One forward and backward; gradients are new tensors."""
    tower.zero_grad(set_to_none=True)
    outputs = outputs_of(tower(pixels, grid_thw=grid))
    torch.autograd.backward(outputs, [each.to(out.dtype) for each, out in zip(incoming, outputs, strict=True)])


def milliseconds(tower: Any, *call: Any) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step(tower, *call)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def peak_gigabytes(tower: Any, *call: Any) -> float:
    tower.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(tower, *call)
    torch.cuda.synchronize()
    tower.zero_grad(set_to_none=True)
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def errors(tower: Any, exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative L2 error of every parameter's gradient."""
    found = {name: parameter.grad.float() for name, parameter in tower.named_parameters()}
    return {name: float((grad - exact[name]).norm() / exact[name].norm()) for name, grad in found.items()}


def compare(stock: Any, patched: Any, pixels: torch.Tensor, *call: Any) -> dict[str, float]:
    """The patched gradients' errors over stock's own: the largest of all parameters, and the mean."""
    exact = deepcopy(stock).float()
    step(exact, pixels.float(), *call)
    gradients = {name: parameter.grad for name, parameter in exact.named_parameters()}
    for tower in (stock, patched):
        step(tower, pixels, *call)
    own, ours = errors(stock, gradients), errors(patched, gradients)
    ratios = [ours[name] / own[name] for name in own]
    return {"largest_ratio": max(ratios), "mean_ratio": statistics.mean(ratios)}


def measure(model: str, device: torch.device) -> list[dict[str, Any]]:
    stock = build_tower(model, device, torch.bfloat16).requires_grad_(True).train()
    patched = hf_vit_accel.patch(deepcopy(stock), strict=True)
    rows = []
    for size in INPUTS:
        grid, generator = torch.tensor(SIZES[size], device=device), torch.Generator(device).manual_seed(0)
        patches = int(grid.prod(1).sum())
        width = stock.patch_embed.proj.weight[0].numel()
        pixels = torch.randn(patches, width, generator=generator, device=device).bfloat16()
        with torch.no_grad():
            shapes = [out.shape for out in outputs_of(patched(pixels, grid_thw=grid))]
        call = pixels, grid, [torch.randn(shape, generator=generator, device=device) for shape in shapes]
        towers = {"patched": patched}
        if patches < STOCK_LIMIT or model != "qwen2.5-vl-7b":
            towers["stock sdpa"] = stock
        row: dict[str, Any] = {"model": model, "size": size, "patches": patches}
        row["floor_ms"] = 3 * matrix_flops(stock, SIZES[size]) / PEAK / 1e9
        row |= compare(stock, patched, *call) if size == COMPARED else {}
        times: dict[str, list[float]] = {name: [] for name in towers}
        for tower in towers.values():
            milliseconds(tower, *call)
        peaks = {name: peak_gigabytes(tower, *call) for name, tower in towers.items()}
        for index in range(ROUNDS):
            for name in list(towers)[:: -1 if index % 2 else 1]:
                milliseconds(towers[name], *call)
                times[name] += [milliseconds(towers[name], *call) for _ in range(TIMED)]
        for name in towers:
            row[name] = {"ms": statistics.median(times[name]), "ms_low": min(times[name]), "peak_gb": peaks[name]}
        rows.append(row)
        print(json.dumps(row, ensure_ascii=False), flush=True)
    return rows


def main() -> None:
    device = torch.device("cuda", 0)
    torch.backends.cudnn.allow_tf32 = False
    rows = [row for model in MODELS for row in measure(model, device)]
    found = {"device": env.cuda_device_name(), "command": sys.argv, "versions": env.versions(), "rows": rows}
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "training.json")
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
