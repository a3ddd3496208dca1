"""Test the attention function that transformers calls by our names: plans, offsets, dropout, attentions."""

from __future__ import annotations

import pytest
import torch
from support.saved import Saved
from tiny import GRIDS, assert_close, merged_of, outputs_of, pixels_for, run_tower, tower_of

import hf_vit_accel
from hf_vit_accel.tower.state import state_of

AUTO = "flash_vit_auto"


def test_a_stock_tower_under_our_name_is_right_without_plans(saved: Saved) -> None:
    """A tower with a stock forward may share a config that has our name. Its attention makes its own plans."""
    expected = saved.outputs()
    tower = tower_of(saved.load())
    tower.config._attn_implementation_internal = AUTO
    assert state_of(tower) is None
    assert_close(run_tower(tower, GRIDS["mixed"]), expected)
    with pytest.raises(ValueError, match="cu_seqlens to rise from 0"):
        run_tower(tower, GRIDS["image"], cu_seqlens=torch.tensor([0, 8], dtype=torch.int32))


def test_dropout_is_stock(saved: Saved) -> None:
    """Stock hard-codes 0.0. A user who sets a rate gets stock's dropout, value for value under one seed."""
    outputs = []
    for is_patched in (False, True):
        model = saved.load().train()
        tower = tower_of(model)
        for block in tower.blocks:
            block.attn.attention_dropout = 0.5
        if is_patched:
            hf_vit_accel.patch(model)
        for grad in (False, True):
            torch.manual_seed(0)
            with torch.set_grad_enabled(grad):
                pixels = pixels_for(tower, GRIDS["image"])
                outputs.append(outputs_of(tower(pixels, grid_thw=torch.tensor(GRIDS["image"])))[0])
    assert_close(outputs[2:], outputs[:2])


def test_attentions_of_an_eager_model_are_returned(saved: Saved) -> None:
    """Setting `config.output_attentions` needs the name "eager", so a patched model keeps that name."""
    model = saved.load(attn_implementation="eager")
    tower = tower_of(model)
    grid = torch.tensor(GRIDS["images"])
    pixels = pixels_for(tower, GRIDS["images"])
    with torch.no_grad():
        stock = tower(pixels, grid_thw=grid)
        tower.config.output_attentions = True
        expected = tower(pixels, grid_thw=grid).attentions
        tower.config.output_attentions = False
        hf_vit_accel.patch(model)
        assert_close([merged_of(tower(pixels, grid_thw=grid))], [merged_of(stock)])
        assert state_of(tower).fast_calls == 1
        tower.config.output_attentions = True
        attentions = tower(pixels, grid_thw=grid).attentions
    assert len(attentions) == len(tower.blocks)
    assert_close(list(attentions), list(expected))
