"""Hooks on mergers and the patch embedding, and inside them, run on the fast path and see what stock's see."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.towers import TOWERS
from tiny import GRIDS, TINY, assert_close, outputs_of, pixels_for, run_tower, tower_of
from torch import Tensor, nn

import hf_vit_accel

GRID = GRIDS["mixed"]


@pytest.fixture(params=TOWERS)
def tower(request: pytest.FixtureRequest) -> Any:
    return tower_of(TINY[request.param].build())


def parts_of(tower: Any) -> list[nn.Module]:
    """Return the modules that are hooked: patch embedding, mergers, and one module inside each."""
    parts = [tower.patch_embed, tower.merger, *getattr(tower, "deepstack_merger_list", ())[:1]]
    return parts + [list(part.modules())[-1] for part in parts]


def tensors_in(values: Any) -> list[Tensor]:
    return [value.detach().clone() for value in values if isinstance(value, Tensor)]


def hook(tower: Any, *, doubles: bool) -> tuple[list[Tensor], list[Any]]:
    """Hook the forward, before and after; return what hooks see, and their handles."""
    seen: list[Tensor] = []
    handles = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.extend(tensors_in([*args, *kwargs.values()]))

    def after(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        seen.extend(tensors_in([output]))
        return output * 2 if doubles else None

    for part in parts_of(tower):
        handles += [part.register_forward_pre_hook(before, with_kwargs=True), part.register_forward_hook(after)]
    return seen, handles


@pytest.mark.parametrize("doubles", [False, True])
def test_hooks_see_and_change_what_stocks_do(tower: Any, doubles: bool) -> None:
    stock = copy.deepcopy(tower)
    hf_vit_accel.patch(tower, strict=True)
    unhooked = run_tower(tower, GRID)
    expected_seen, _ = hook(stock, doubles=doubles)
    seen, handles = hook(tower, doubles=doubles)
    expected = run_tower(stock, GRID)
    assert_close(run_tower(tower, GRID), expected)
    assert_close(seen, expected_seen)
    for handle in handles:
        handle.remove()
    count = len(seen)
    assert_close(run_tower(tower, GRID), unhooked)
    assert len(seen) == count
    [status] = hf_vit_accel.status(tower).towers
    assert (status.calls, status.stock_calls) == (3, 0)


def test_gradients_through_hooks_are_stocks(tower: Any) -> None:
    stock = copy.deepcopy(tower)
    hf_vit_accel.patch(tower, strict=True)
    results = []
    for each in (stock, tower):
        seen: list[Tensor] = []
        hook(each, doubles=True)
        for part in parts_of(each):
            part.register_full_backward_hook(lambda _, __, dout, seen=seen: seen.extend(tensors_in(dout)))
            part.register_full_backward_pre_hook(lambda _, dout, seen=seen: seen.extend(tensors_in(dout)))
        pixels = pixels_for(each, GRID).requires_grad_()
        outputs = outputs_of(each(pixels, grid_thw=torch.tensor(GRID)))
        sum(output.square().mean() for output in outputs).backward()
        results.append([*seen, pixels.grad, *(parameter.grad for parameter in each.parameters())])
    assert_close(results[1], results[0])
    assert hf_vit_accel.status(tower).towers[0].stock_calls == 0


def test_hooked_calls_are_neither_cut_nor_reused(tower: Any) -> None:
    grid = [(1, 4, 4), (1, 4, 4)]
    pixels = pixels_for(tower, grid[:1]).repeat(2, 1)
    hf_vit_accel.patch(tower, reuse=True, max_rows=16)
    calls: list[int] = []
    tower.merger.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        tower(pixels, grid_thw=torch.tensor(grid))
    [status] = hf_vit_accel.status(tower).towers
    assert (status.calls, len(calls)) == (1, 1) and "hooks" in next(iter(status.fallbacks))
