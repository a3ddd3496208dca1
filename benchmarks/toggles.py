"""Time rounds that switch a tower as GRPO trainers do: a rollout in eval mode, then a step with gradient checkpointing.

python benchmarks/toggles.py [--json FILE] [--models qwen3-vl-8b,qwen2.5-vl-7b]

Towers run alone, with random weights in real shapes, in bf16. A round switches checkpointing off, calls the tower in
`eval()` without gradients as often as a rollout asks (policy, reference, old policy), switches checkpointing on, and
trains one step. All contenders take turns, and are compared with stock before anything is timed. `status` must count
no rebuild after the second round, and replays where graphs are on.
"""

from copy import deepcopy
from functools import partial

import torch
from measuring import DEVICE, ERROR_BAR, Row, largest_error, measure_models, switch_checkpointing, time_rows
from torch import nn

from hf_vit_accel import patch, status
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools.bench.measure import draw_pixels
from hf_vit_accel.tools.bench.towers import SIZES, build_tower

INPUTS = "one 448²", "one 1024²"
FORWARDS = 3
"""Calls without gradients in a round."""


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


def time_model(model: str, rounds: int) -> list[Row]:
    """Verify and time one tower with all inputs."""
    stock = build_tower(model, DEVICE, torch.bfloat16).requires_grad_(True)
    eager, ours = deepcopy(stock), deepcopy(stock)
    patch(eager, cuda_graphs=False)
    patch(ours)
    contenders = {"stock": stock, "cuda_graphs=False": eager, "patch(model)": ours}
    rows = []
    for size in INPUTS:
        pixels_TP = draw_pixels(stock, SIZES[size], 0)
        grid = torch.tensor(SIZES[size], device=DEVICE)
        exact = rollout(deepcopy(stock).float(), pixels_TP.float(), grid)
        own_error = largest_error(rollout(stock, pixels_TP, grid), exact)
        for tower in (eager, ours):
            for _ in range(3):  # until graphs are replayed
                one_round(tower, pixels_TP, grid)
                error = largest_error(rollout(tower, pixels_TP, grid), exact)
                assert error <= ERROR_BAR * own_error, (error, own_error)
        rebuilds = [status(tower).towers[0].rebuilds for tower in (eager, ours)]
        steps = {name: partial(one_round, tower, pixels_TP, grid) for name, tower in contenders.items()}
        rows += time_rows(steps, rounds, DEVICE, model=model, size=size, patches=rows_of(SIZES[size]))
        assert rebuilds == [status(tower).towers[0].rebuilds for tower in (eager, ours)], "caches were dropped"
    served = status(ours).towers[0]
    print(served)
    assert served.stock_calls == 0, served.fallbacks
    assert DEVICE.type != "cuda" or (served.graphs is not None and served.graphs.replays and not served.graphs.stale)
    return rows


if __name__ == "__main__":
    measure_models(__doc__, "qwen3-vl-8b,qwen2.5-vl-7b", time_model)
