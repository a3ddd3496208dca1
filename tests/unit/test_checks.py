"""Test the checks of a call: every hook runs, and outputs have the form that the config says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.towers import ONE_TOWER
from tiny import (
    FAMILIES,
    GRIDS,
    TINY,
    assert_close,
    merged_of,
    outputs_of,
    pixels_for,
    run_tower,
    tower_of,
)
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle
from transformers.utils import ModelOutput

import hf_vit_accel
from hf_vit_accel.tower.state import state_of

GRID = GRIDS["mixed"]
FEW = [(1, 10, 6), (2, 4, 4)]


@pytest.fixture(params=ONE_TOWER)
def tower(request: pytest.FixtureRequest) -> nn.Module:
    return tower_of(TINY[request.param].build())


def counts(tower: nn.Module) -> tuple[int, int]:
    """Return the numbers of fast and of stock calls."""
    [status] = hf_vit_accel.status(tower).towers
    return status.calls, status.stock_calls


# --- hooks ----------------------------------------------------------------------------------------------------------

Register = Callable[[nn.Module, Callable[..., None]], RemovableHandle]
HOOKS: dict[str, Register] = {
    "forward": lambda module, hook: module.register_forward_hook(hook),
    "forward pre": lambda module, hook: module.register_forward_pre_hook(hook),
    "full backward": lambda module, hook: module.register_full_backward_hook(hook),
    "backward pre": lambda module, hook: module.register_full_backward_pre_hook(hook),
    "global": lambda module, hook: register_module_forward_hook(hook),
}
HOOKED = ("patch_embed.proj", "blocks.1", "blocks.2.attn", "blocks.0.attn.qkv", "merger")


@pytest.mark.parametrize(
    ("kind", "name", "family"),
    [
        pytest.param(kind, name, FAMILIES[(row + column) % len(FAMILIES)], marks=[pytest.mark.matrix] * (index > 1))
        for row, kind in enumerate(HOOKS)
        for column, name in enumerate(HOOKED)
        for index in [(row - column) % len(HOOKED)]
    ],
)
def test_hooks_run_until_they_are_removed(kind: str, name: str, family: str) -> None:
    """Hooks of the backward pass matter only to calls that record gradients. The cases take families in turn."""
    tower = tower_of(TINY[family].build())
    is_backward = "backward" in kind
    is_fast = kind != "global"
    calls: list[str] = []
    expected = run_tower(tower, FEW)
    hf_vit_accel.patch(tower)
    handle = HOOKS[kind](tower.get_submodule(name), lambda *_: calls.append(kind))
    try:
        assert_close(run_tower(tower, FEW), expected)
        assert counts(tower) == ((1, 0) if is_backward or is_fast else (0, 1)) and bool(calls) != is_backward
        outputs = outputs_of(tower(pixels_for(tower, FEW).requires_grad_(), grid_thw=torch.tensor(FEW)))
        torch.stack([output.square().mean() for output in outputs]).sum().backward()
        stock_calls = 0 if is_fast else 1 if is_backward else 2
        assert calls and state_of(tower).fallbacks == ({} if is_fast else {"global module hooks": stock_calls})
        assert state_of(tower).stock_calls == stock_calls
    finally:
        handle.remove()
    assert_close(run_tower(tower, FEW), expected)
    assert state_of(tower).stock_calls == stock_calls


def test_a_reason_counts_once_a_call(tower: nn.Module) -> None:
    """DeepSpeed's ZeRO-3 sets hooks of both kinds on every module, and names its parameters."""
    for parameter in tower.parameters():
        parameter.ds_id = 0
    for module in tower.modules():
        module.register_forward_pre_hook(lambda module, args: None)
        module.register_forward_hook(lambda module, args, output: None)
    hf_vit_accel.patch(tower)
    run_tower(tower, GRID)
    [status] = hf_vit_accel.status(tower).towers
    assert status.stock_calls == 1 and set(status.fallbacks.values()) == {1}
    assert len(set(status.against_fast)) == len(status.against_fast)
    assert any("ZeRO-3" in reason for reason in status.against_fast)


@pytest.mark.parametrize("wrap", [lambda features: features, lambda features: [features]], ids=["tensor", "list"])
def test_a_hook_may_keep_features_on_the_tower(
    tower: nn.Module, wrap: Callable[[torch.Tensor], torch.Tensor | list[torch.Tensor]]
) -> None:
    """Cover features that are there at the patch, that later calls replace, and that another snapshot meets."""
    expected = run_tower(tower, GRID)

    def keep(module: nn.Module, args: object, output: ModelOutput) -> None:
        module.features = wrap(merged_of(output).detach())

    tower.register_forward_hook(keep)
    run_tower(tower, GRID)
    hf_vit_accel.patch(tower)
    for _ in range(3):
        assert_close(run_tower(tower, GRID), expected)
    tower.blocks[0].mlp = copy.deepcopy(tower.blocks[0].mlp)
    for _ in range(2):
        assert_close(run_tower(tower, GRID), expected)
    assert counts(tower) == (5, 0) and hf_vit_accel.status(tower).towers


# --- options --------------------------------------------------------------------------------------------------------


def flattened(output: tuple[Any, ...] | ModelOutput) -> list[torch.Tensor]:
    """Return the tensors of a tower's output, which may be a tuple."""
    values = output if isinstance(output, tuple) else output.to_tuple()
    return [*values[:2], *(values[2] if len(values) > 2 else ())]


@pytest.mark.parametrize("options", [{}, {"return_dict": True}, {"return_dict": False}], ids=str)
def test_outputs_are_returned_as_the_config_says(tower: nn.Module, options: dict[str, bool]) -> None:
    tower.config.return_dict = False
    pixels = pixels_for(tower, GRID)
    grid = torch.tensor(GRID)
    with torch.no_grad():
        expected = tower(pixels, grid, **options)
        if isinstance(expected, torch.Tensor):
            pytest.skip("this transformers returns merged features alone, whatever is requested")
        hf_vit_accel.patch(tower, strict=True)
        outputs = (tower(pixels, grid, **options), tower(pixels, grid_thw=grid, **options))
    for output in outputs:
        assert type(output) is type(expected) and isinstance(output, tuple) == (not options.get("return_dict"))
        fields = [type(value) for value in (output if isinstance(output, tuple) else output.to_tuple())]
        assert fields == [type(value) for value in (expected if isinstance(expected, tuple) else expected.to_tuple())]
        assert_close(flattened(output), flattened(expected))


def test_strict_is_true_or_false(tower: nn.Module) -> None:
    for strict in ("no", 1, None):
        with pytest.raises(ValueError, match="expected strict to be True or False"):
            hf_vit_accel.patch(tower, strict=strict)
    assert state_of(tower) is None
