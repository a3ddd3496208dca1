"""Time rounds that switch a tower as GRPO trainers do: a rollout in eval mode, then a step with gradient checkpointing.

python benchmarks/toggles.py [--json FILE] [--models qwen3-vl-8b,qwen2.5-vl-7b] [--device cuda]

Towers run alone, with random weights in real shapes, in bf16. A round switches checkpointing off, calls the tower in
`eval()` without gradients as often as a rollout asks (policy, reference, old policy), switches checkpointing on, and
trains one step. All contenders take turns, and are compared with stock before anything is timed. `status` must count
no rebuild after the second round, and replays where graphs are on.
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

INPUTS = "one 448²", "one 1024²"
FORWARDS = 3
"""Calls without gradients in a round."""
ERROR_BAR = 1.1
"""Times stock's own error in bf16."""


def switch_checkpointing(tower: nn.Module, *, enable: bool) -> None:
    """Switch it as trainers do. transformers 5.23 renamed the methods."""
    word = "activation" if hasattr(tower, "activation_checkpointing_enable") else "gradient"
    if enable:
        options = {f"{word}_checkpointing_kwargs": {"use_reentrant": False}}
        getattr(tower, f"{word}_checkpointing_enable")(**options)
    else:
        getattr(tower, f"{word}_checkpointing_disable")()


def rollout(tower: nn.Module, pixels_TP: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
    """Call a tower in eval mode without gradients; return its merged features."""
    switch_checkpointing(tower, enable=False)
    tower.eval()
    with torch.no_grad():
        for _ in range(FORWARDS):
            output = tower(pixels_TP, grid_thw=grid)
    return [output.pooler_output]


def one_round(tower: nn.Module, pixels_TP: torch.Tensor, grid: torch.Tensor) -> None:
    """Run a rollout, then a step."""
    rollout(tower, pixels_TP, grid)
    tower.train()
    switch_checkpointing(tower, enable=True)
    tower.zero_grad(set_to_none=True)
    tower(pixels_TP, grid_thw=grid).pooler_output.float().square().mean().backward()


def time_model(model: str, device: torch.device, rounds: int) -> list[Row]:
    """Verify and time one tower with all inputs."""
    stock = build_tower(model, device, torch.bfloat16).requires_grad_(True)
    eager, ours = deepcopy(stock), deepcopy(stock)
    patch(eager, cuda_graphs=False)
    patch(ours)
    contenders = {"stock": stock, "cuda_graphs=False": eager, "patch(model)": ours}
    rows = []
    for size in INPUTS:
        grid = torch.tensor(SIZES[size], device=device)
        patches = int(grid.prod(dim=1).sum())
        generator = torch.Generator(device).manual_seed(0)
        shape = patches, weight_of(stock)[0].numel()
        pixels_TP = torch.randn(shape, device=device, generator=generator).bfloat16()
        exact = rollout(deepcopy(stock).float(), pixels_TP.float(), grid)
        own_error = largest_error(rollout(stock, pixels_TP, grid), exact)
        for tower in (eager, ours):
            for _ in range(3):  # until graphs are replayed
                one_round(tower, pixels_TP, grid)
                error = largest_error(rollout(tower, pixels_TP, grid), exact)
                assert error <= ERROR_BAR * own_error, (error, own_error)
        rebuilds = [status(tower).towers[0].rebuilds for tower in (eager, ours)]
        steps = {name: partial(one_round, tower, pixels_TP, grid) for name, tower in contenders.items()}
        times = time_in_turns(steps, rounds, cuda=device.type == "cuda")
        for contender, of_contender in times.items():
            milliseconds = statistics.median(of_contender)
            rows.append(dict(model=model, size=size, patches=patches, contender=contender, ms=milliseconds))
            print(f"{model:<16}{size:<12}{contender:<20}{milliseconds:8.2f} ms", flush=True)
        assert rebuilds == [status(tower).towers[0].rebuilds for tower in (eager, ours)], "caches were dropped"
    served = status(ours).towers[0]
    print(served)
    assert served.stock_calls == 0, served.fallbacks
    assert device.type != "cuda" or (served.graphs is not None and served.graphs.replays and not served.graphs.stale)
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
