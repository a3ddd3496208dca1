"""What the checks of a steady call take on this host: all that is asked before a route is chosen.

python examples/benchmark/checks.py [--json FILE] [--models qwen3-vl-8b,qwen2.5-vl-7b]

Is the tower still what was read, what does its config ask for, have parameters moved, do the inputs fit, are there
hooks? Frozen towers in real shapes; the grid lies on the host, so nothing waits for the GPU. Medians of 1,000, in
microseconds, without gradients and with gradients enabled; `least` is the fastest tenth.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import hf_vit_accel
from hf_vit_accel import machine
from hf_vit_accel.engine import inputs
from hf_vit_accel.tools import bench
from hf_vit_accel.tools.bench.towers import build_tower, weight_of
from hf_vit_accel.tower import checks as guard
from hf_vit_accel.tower.state import state_of

CALLS = 1000
GRID = [(1, 28, 28)]


def checked(tower: Any, pixels_TP: torch.Tensor, grid: torch.Tensor) -> list[str]:
    """What a call of a patched tower asks, in its order; the reasons against serving it."""
    state: Any = state_of(tower)
    snapshot, grad = state.snapshot(tower), torch.is_grad_enabled()
    name = tower.config._attn_implementation
    reasons = guard.reasons_stock(tower, state.former_forward, name, snapshot, {})
    parameters, weights = snapshot.weights()
    call = inputs.read(snapshot.expected, None, pixels_TP, grid_thw=grid)
    assert call is not None
    if grad and (snapshot.foreign or call.pixels.requires_grad or snapshot.trained(parameters)):
        reasons.append("something is trained")
    return reasons + guard.reasons_slow(tower, snapshot, weights, call.options, grad=grad)


def measure(tower: Any, *, grad: bool, calls: int = CALLS) -> dict[str, float]:
    """Microseconds of the checks of a patched, frozen tower."""
    weight = weight_of(tower)
    rows = sum(t * h * w for t, h, w in GRID)
    pixels_TP = torch.zeros(rows, weight[0].numel(), device=weight.device, dtype=weight.dtype)
    grid, times = torch.tensor(GRID), []
    with torch.set_grad_enabled(grad):
        tower(pixels_TP, grid_thw=grid)
        assert not (reasons := checked(tower, pixels_TP, grid)), reasons
        for _ in range(calls):
            begin = time.perf_counter()
            checked(tower, pixels_TP, grid)
            times.append(1e6 * (time.perf_counter() - begin))
    return {"median": sorted(times)[calls // 2], "least": sorted(times)[calls // 10]}


def main() -> None:
    """Time each model's checks; write or print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen2.5-vl-7b,qwen3-vl-8b,qwen2-vl-7b")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, rows = bench.device_of_choice(), []
    for model in arguments.models.split(","):
        tower = build_tower(model, device, bench.default_dtype(device)).requires_grad_(False)
        hf_vit_accel.patch(tower)
        for grad in (False, True):
            rows.append({"model": model, "grad": grad, **measure(tower, grad=grad)})
            print(rows[-1], flush=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    found = {
        "device": name,
        "dtype": "bfloat16",
        "versions": machine.versions(),
        "machine": bench.host(),
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
