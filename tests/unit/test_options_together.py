"""Test options beside each other: passes, reuse and ranks wrap one another, around replays, and equal stock."""

from __future__ import annotations

import random

import torch
from support.cpu_graphs import SMALL
from support.grids import drawn
from support.ranks import OnRanks, sharing_of
from tiny import TINY, assert_close, largest_error, outputs_of, pixels_for, tower_of
from torch import nn

import hf_vit_accel

OPTIONS = [(40, True, False), (40, False, SMALL), (None, True, SMALL), (40, True, SMALL)]
"""Values of max_rows, reuse and cuda_graphs. Each option alone has tests of its own."""
Results = tuple[list[torch.Tensor], list[torch.Tensor]]


def results_of(tower: nn.Module, pixels: torch.Tensor, grid: torch.Tensor, *, grad: bool) -> Results:
    """Return the outputs of a call, and the gradients of all weights by a loss that weights rows differently."""
    tower.zero_grad()
    with torch.set_grad_enabled(grad):
        outputs = outputs_of(tower(pixels, grid_thw=grid))
    if grad:
        sum((x.square() * torch.linspace(0.5, 1, len(x))[:, None]).mean() for x in outputs).backward()
    gradients = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
    return [output.detach() for output in outputs], gradients


def check_options(rank: int) -> None:
    generator = random.Random(5)
    tower = tower_of(TINY["qwen2_5_vl"].build())
    for seed, (max_rows, reuse, graphs) in enumerate(OPTIONS):
        sizes = drawn(generator)[:3]
        pixels = pixels_for(tower, sizes, seed)
        grid = torch.tensor([*sizes, *sizes, sizes[0]])
        first = pixels[: sizes[0][0] * sizes[0][1] * sizes[0][2]]
        pixels = torch.cat([pixels, pixels, first])
        for grad in (False, True):
            expected, expected_gradients = results_of(tower, pixels, grid, grad=grad)
            options = dict(max_rows=max_rows, reuse=reuse, cuda_graphs=graphs)
            hf_vit_accel.patch(tower, data_parallel=True, **options)
            for _ in range(2):
                outputs, gradients = results_of(tower, pixels, grid, grad=grad)
                assert_close(outputs, expected)
                assert len(gradients) == len(expected_gradients)
                assert not grad or largest_error(gradients, expected_gradients) < 1e-4
            status = hf_vit_accel.status(tower).towers[0]
            assert (status.calls, status.stock_calls) == (2, 0) and "2 calls shared" in str(sharing_of(tower))
            assert status.reuse is None or status.reuse.encoded <= 2 * len(sizes)
            hf_vit_accel.unpatch(tower)


def test_options_together_equal_stock(references: list[str], on_cpu: type, on_ranks: OnRanks) -> None:
    on_ranks(check_options, 2)
