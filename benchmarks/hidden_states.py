"""Time towers that also return the hidden state of every block, as colpali's models ask in every call.

python benchmarks/hidden_states.py [--json FILE] [--models qwen3-vl-8b,qwen2.5-vl-7b] [--device cuda]

Towers run alone, with random weights in real shapes, in bf16. All contenders are compared with stock in fp32 before
anything is timed, and take turns. `not asked` is `patch(model)` without the request: what the request costs.
"""

import argparse
import statistics
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from measuring import Row, device_name, largest_error, write_json
from torch import nn

from hf_vit_accel import machine, patch, status
from hf_vit_accel.tools.bench.timing import time_in_turns
from hf_vit_accel.tools.bench.towers import SIZES, build_tower, weight_of

INPUTS = "one 448²", "one 1024²", "16 x 512²"
ERROR_BAR = 1.1
"""Times stock's own error in bf16."""


def hidden_states_of(tower: nn.Module, pixels_TP: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
    """Call a tower without gradients; return the hidden states."""
    with torch.no_grad():
        return list(tower(pixels_TP, grid_thw=grid, output_hidden_states=True).hidden_states)


def features_of(tower: nn.Module, pixels_TP: torch.Tensor, grid: torch.Tensor) -> object:
    """Call a tower without the request."""
    with torch.no_grad():
        return tower(pixels_TP, grid_thw=grid)


def time_model(model: str, device: torch.device, rounds: int) -> list[Row]:
    """Verify and time one tower with all inputs."""
    stock = build_tower(model, device, torch.bfloat16).requires_grad_(False).eval()
    ours, eager, not_asked = (deepcopy(stock) for _ in range(3))
    patch(ours)
    patch(eager, cuda_graphs=False)
    patch(not_asked)
    rows = []
    for size in INPUTS:
        grid = torch.tensor(SIZES[size], device=device)
        patches = int(grid.prod(dim=1).sum())
        generator = torch.Generator(device).manual_seed(0)
        shape = patches, weight_of(stock)[0].numel()
        pixels_TP = torch.randn(shape, device=device, generator=generator).bfloat16()
        exact = hidden_states_of(deepcopy(stock).float(), pixels_TP.float(), grid)
        own_error = largest_error(hidden_states_of(stock, pixels_TP, grid), exact)
        for _ in range(4):  # until graphs are replayed
            error = largest_error(hidden_states_of(ours, pixels_TP, grid), exact)
            assert error <= ERROR_BAR * own_error, (error, own_error)
        del exact
        steps = {
            "stock": partial(hidden_states_of, stock, pixels_TP, grid),
            "patch(model)": partial(hidden_states_of, ours, pixels_TP, grid),
            "cuda_graphs=False": partial(hidden_states_of, eager, pixels_TP, grid),
            "not asked": partial(features_of, not_asked, pixels_TP, grid),
        }
        for step in steps.values():
            for _ in range(4):
                step()
        times = time_in_turns(steps, rounds, cuda=device.type == "cuda")
        for contender, of_contender in times.items():
            milliseconds = statistics.median(of_contender)
            rows.append(dict(model=model, size=size, patches=patches, contender=contender, ms=milliseconds))
            print(f"{model:<16}{size:<12}{contender:<20}{milliseconds:8.2f} ms", flush=True)
    served = status(ours).towers[0]
    assert served.stock_calls == 0, served.fallbacks
    return rows


def main() -> None:
    """Read the options, time all models, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default="qwen3-vl-8b,qwen2.5-vl-7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    device = torch.device(options.device)
    rows: list[Row] = []
    for model in options.models.split(","):
        rows += time_model(model, device, options.rounds)
    common = dict(device=device_name(device), dtype="bfloat16", versions=machine.versions())
    write_json(options.json, dict(**common, rows=rows))


if __name__ == "__main__":
    main()
