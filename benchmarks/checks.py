"""Time what a steady call takes of the host: its checks, and one layer of a call without CUDA graphs.

python benchmarks/checks.py [--json FILE] [--models qwen3-vl-8b,qwen2.5-vl-7b]

The checks run before a route is chosen. Is the tower unchanged, which attention does its config name, have parameters
moved, do the inputs fit, are there hooks?
Towers are frozen and have real shapes. The grid is on the host, so nothing waits for the GPU. Times are medians of
1,000 calls in microseconds, without gradients and with gradients enabled; `least` is the fastest tenth. The last
row of a model is the time of Python and launches for each layer, without CUDA graphs.
"""

import time
from typing import Any

import torch
from measuring import DEVICE, DTYPE, Row, measure_models
from torch import nn

import hf_vit_accel
from hf_vit_accel.engine import inputs
from hf_vit_accel.engine.encoder import Residual, encode
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools.bench.towers import build_tower, weight_of
from hf_vit_accel.tower.forward import reasons_of
from hf_vit_accel.tower.state import state_of

CALLS = 1000
GRID = ((1, 28, 28),)


def checked(tower: nn.Module, pixels_TP: torch.Tensor, grid: torch.Tensor) -> list[str]:
    """Run the checks of a patched tower's call in their order; return the reasons against the fast path."""
    state: Any = state_of(tower)
    snapshot = state.snapshot(tower)
    grad = torch.is_grad_enabled()
    name = tower.config._attn_implementation
    against = reasons_of(tower, state.family, snapshot, state.former_forward, name, {}, grad=grad)
    reasons = [*against.stock, *against.slow]
    call = inputs.read(snapshot.expected, None, pixels_TP, grid_thw=grid)
    assert call is not None
    if grad and (snapshot.unpredictable or call.pixels.requires_grad or snapshot.is_trained(against.parameters)):
        reasons.append("something is trained")
    return reasons


def measure(tower: nn.Module, *, grad: bool, calls: int = CALLS) -> dict[str, float]:
    """Time the checks of a patched, frozen tower.

    Returns:
        The `median` and the fastest tenth (`least`), in microseconds.
    """
    weight = weight_of(tower)
    pixels_TP = torch.zeros(rows_of(GRID), weight[0].numel(), device=weight.device, dtype=weight.dtype)
    grid = torch.tensor(GRID)
    times = []
    with torch.set_grad_enabled(grad):
        tower(pixels_TP, grid_thw=grid)
        reasons = checked(tower, pixels_TP, grid)
        assert not reasons, reasons
        for _ in range(calls):
            begin = time.perf_counter()
            checked(tower, pixels_TP, grid)
            times.append(1e6 * (time.perf_counter() - begin))
    return {"median": sorted(times)[calls // 2], "least": sorted(times)[calls // 10]}


def measure_layer(tower: nn.Module, *, calls: int = CALLS // 10) -> dict[str, float]:
    """Time the layers of a call without CUDA graphs until their kernels are launched, from the first to the last.

    Returns:
        The `median` and the fastest tenth (`least`) of calls, in microseconds for each layer.
    """
    weight = weight_of(tower)
    hf_vit_accel.patch(tower, cuda_graphs=False)
    pixels_TP = torch.zeros(rows_of(GRID), weight[0].numel(), device=weight.device, dtype=weight.dtype)
    ends: list[float] = []

    def note_end(index: int, residual: Residual) -> Residual:
        ends.append(time.perf_counter())
        return residual

    times = []
    with torch.no_grad():
        tower(pixels_TP, grid_thw=torch.tensor(GRID))
        state: Any = state_of(tower)
        route = state.last_route.ready()
        for _ in range(calls + 5):
            if weight.is_cuda:
                torch.cuda.synchronize()
            ends.clear()
            encode(route, pixels_TP, after_layer=note_end)
            times.append(1e6 * (ends[-1] - ends[0]) / (len(ends) - 1))
    times = sorted(times[5:])
    return {"median": times[calls // 2], "least": times[calls // 10]}


def measure_model(model: str) -> list[Row]:
    """Time the checks and a layer of one model."""
    tower = build_tower(model, DEVICE, DTYPE).requires_grad_(False)
    hf_vit_accel.patch(tower)
    rows: list[Row] = [{"model": model, "grad": grad, **measure(tower, grad=grad)} for grad in (False, True)]
    rows.append({"model": model, "what": "a layer", **measure_layer(tower)})
    print(*rows, sep="\n", flush=True)
    return rows


if __name__ == "__main__":
    measure_models(__doc__, "qwen2.5-vl-7b,qwen3-vl-8b,qwen2-vl-7b", measure_model, options={})
