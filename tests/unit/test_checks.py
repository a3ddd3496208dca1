"""Test the checks of a call: hooks of other programs, and the form of outputs that the config says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import (
    GRIDS,
    assert_close,
    merged_of,
    pixels_for,
    run_tower,
)
from torch import nn
from transformers.utils import ModelOutput

import hf_vit_accel
from hf_vit_accel.tower.state import state_of

GRID = GRIDS["mixed"]


# --- hooks ----------------------------------------------------------------------------------------------------------


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
    [status] = hf_vit_accel.status(tower).towers
    assert (status.calls, status.stock_calls) == (5, 0)


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
