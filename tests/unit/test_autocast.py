"""Test patched towers under autocast: dtypes of stock, errors of stock, and nothing shared with calls without it."""

from __future__ import annotations

import pytest
import torch
from support.towers import ONE_TOWER
from tiny import TINY, assert_close, outputs_of, pixels_for, relative_error, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel.tower.state import state_of

GRID = [(1, 10, 6), (3, 4, 2), (1, 2, 10)]
SEEDS = range(5)


@pytest.fixture(params=ONE_TOWER)
def tower(request: pytest.FixtureRequest) -> nn.Module:
    return tower_of(TINY[request.param].build())


def run_under_autocast(tower: nn.Module, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        return outputs_of(tower(pixels_for(tower, GRID, seed), grid_thw=torch.tensor(GRID)))


def summed_errors(runs: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> list[float]:
    """Return for every output the sum of its errors over the runs."""
    errors = []
    for outputs, exact in zip(runs, expected, strict=True):
        errors.append([relative_error(output, other) for output, other in zip(outputs, exact, strict=True)])
    return [sum(of_output) for of_output in zip(*errors, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "fuse"),
    [(torch.bfloat16, True), (torch.float16, True), (torch.float32, True), (torch.bfloat16, False)],
    ids=str,
)
def test_autocast_is_fast_with_the_dtypes_and_errors_of_stock(tower: nn.Module, dtype: torch.dtype, fuse: bool) -> None:
    tower = tower.to(dtype)
    reference = type(tower)(tower.config).eval()
    reference.load_state_dict({name: value.float() for name, value in tower.state_dict().items()})
    autocast = dtype if dtype == torch.float16 else torch.bfloat16  # stock's LayerNorm takes fp16 weights in no other
    exact = [run_tower(reference, GRID, seed) for seed in SEEDS]
    stock = [run_under_autocast(tower, autocast, seed) for seed in SEEDS]
    hf_vit_accel.patch(tower, fuse=fuse, strict=True)
    patched = [run_under_autocast(tower, autocast, seed) for seed in SEEDS]
    assert (state_of(tower).fast_calls, state_of(tower).stock_calls) == (5, 0)
    assert [(x.dtype, x.shape) for x in patched[0]] == [(x.dtype, x.shape) for x in stock[0]]
    for error, stock_error in zip(summed_errors(patched, exact), summed_errors(stock, exact), strict=True):
        assert error <= max(1.1 * stock_error, len(SEEDS) * torch.finfo(autocast).eps)


def outputs_and_gradients(tower: nn.Module, pixels: torch.Tensor) -> list[torch.Tensor]:
    tower.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = outputs_of(tower(pixels, grid_thw=torch.tensor(GRID)))
    torch.stack([(output * output.cos()).sum() for output in outputs]).sum().backward()
    return [*outputs, *[parameter.grad for parameter in tower.parameters()]]


def test_autocast_leaves_fp64_alone(tower: nn.Module) -> None:
    tower = tower.double().requires_grad_()
    pixels = pixels_for(tower, GRID).double()
    expected = outputs_and_gradients(tower, pixels)
    hf_vit_accel.patch(tower, strict=True)
    tensors = outputs_and_gradients(tower, pixels)
    assert {tensor.dtype for tensor in tensors} == {torch.float64}
    assert_close(tensors, expected, 1e-6)  # RMSNorm works in fp32
    assert (state_of(tower).fast_calls, state_of(tower).stock_calls) == (1, 0)
