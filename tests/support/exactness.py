"""Hold a patched tower to the error that the stock tower has in the same dtype."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from tiny import GRIDS, outputs_of, pixels_for, relative_error, tower_of
from torch import nn

import hf_vit_accel

Grid = list[tuple[int, int, int]]
SEEDS = range(5)


def _run(tower: nn.Module, dtype: torch.dtype, grid: Grid, seed: int) -> list[torch.Tensor]:
    """Return the outputs for pixels that were rounded to a dtype, whatever the dtype of the tower."""
    weight = tower.patch_embed.proj.weight
    pixels = pixels_for(tower, grid, seed).to(dtype).to(weight.device, weight.dtype)
    with torch.no_grad():
        return outputs_of(tower(pixels, grid_thw=torch.tensor(grid, device=weight.device)))


def mean_errors(runs: Iterable[list[torch.Tensor]], exact: Iterable[list[torch.Tensor]]) -> list[float]:
    """Return the mean error of every output over the seeds."""
    errors = []
    for outputs, expected in zip(runs, exact, strict=True):
        errors.append([relative_error(output, other) for output, other in zip(outputs, expected, strict=True)])
    return [sum(of_output) / len(of_output) for of_output in zip(*errors, strict=True)]


def check_error_bound(
    model: nn.Module,
    dtype: torch.dtype,
    device: str,
    attentions: Sequence[str],
    grids: Iterable[Grid] = tuple(GRIDS.values()),
) -> None:
    """Assert errors of at most max(1.1 x stock's, one unit in the last place), against stock in fp32, over five seeds.

    The model in fp32 stays as it is. Each backend in `attentions` is checked with each of the grids.
    """
    tower = tower_of(copy.deepcopy(model)).to(device)
    reference = copy.deepcopy(tower)
    for parameter in tower.parameters():  # buffers, such as rotary frequencies, stay in fp32
        parameter.data = parameter.data.to(dtype)
    for parameter, rounded in zip(reference.parameters(), tower.parameters(), strict=True):
        parameter.data = rounded.data.float()
    for grid in grids:
        exact = [_run(reference, dtype, grid, seed) for seed in SEEDS]
        stock = mean_errors([_run(tower, dtype, grid, seed) for seed in SEEDS], exact)
        for attention in attentions:
            with hf_vit_accel.patched(tower, attention=attention, strict=True):
                patched = mean_errors([_run(tower, dtype, grid, seed) for seed in SEEDS], exact)
            for error, stock_error in zip(patched, stock, strict=True):
                bound = max(1.1 * stock_error, torch.finfo(dtype).eps)
                assert error <= bound, (attention, grid, patched, stock)
