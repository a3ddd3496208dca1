"""Code of the user's that mixes rows of several images, in places where no module of the user's stands."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import TINY, assert_close, merged_of, outputs_of, pixels_for, tower_of
from torch import nn
from transformers.activations import ACT2FN

import hf_vit_accel

GRID = [(1, 4, 4)] * 3
OPTIONS = ({"max_rows": 40}, {"reuse": True})


class MeanActivation(nn.Module):
    """An activation that depends on all rows of a call."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(rows) * (1 + rows.mean())


def mean_activation(rows: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(rows) * (1 + rows.mean())


def exchange_by_function(tower: Any) -> None:
    for block in tower.blocks:
        del block.mlp.act_fn
        block.mlp.act_fn = mean_activation


def exchange_by_partial_function(tower: nn.Module) -> None:
    for block in tower.blocks:
        del block.mlp.act_fn
        block.mlp.act_fn = functools.partial(mean_activation)


def exchange_by_method(tower: nn.Module) -> None:
    activation = MeanActivation()
    for block in tower.blocks:
        del block.mlp.act_fn
        block.mlp.act_fn = activation.forward


def count_rows_in_gradients(tower: Any) -> None:
    tower.pos_embed.scale_grad_by_freq = True


CHANGES = exchange_by_function, exchange_by_partial_function, exchange_by_method, count_rows_in_gradients


def results(model: nn.Module) -> list[torch.Tensor]:
    tower = tower_of(model)
    pixels = pixels_for(tower, GRID)
    pixels[16:32] = pixels[:16]  # two equal pictures
    output = tower(pixels, grid_thw=torch.tensor(GRID))
    outputs = outputs_of(output)
    merged_of(output).square().sum().backward()
    gradients = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
    return [*(output.detach() for output in outputs), *gradients]


@pytest.mark.parametrize("options", OPTIONS, ids=["max_rows", "reuse"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_put_into_a_tower(change: Callable[[Any], None], options: dict[str, Any]) -> None:
    model = TINY["qwen3_vl" if change is count_rows_in_gradients else "qwen2_5_vl"].build()
    change(tower_of(model))
    stock = copy.deepcopy(model)
    hf_vit_accel.patch(model, **options)
    assert_close(results(model), results(stock))
    assert any("may mix rows" in reason for reason in hf_vit_accel.status(model).towers[0].fallbacks)


@pytest.mark.parametrize("options", OPTIONS, ids=["max_rows", "reuse"])
def test_an_activation_that_is_registered_with_transformers(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny tower of a proof has it, too, but that proves nothing about rows."""
    monkeypatch.setitem(ACT2FN, "mean_of_rows", MeanActivation)
    assert isinstance(ACT2FN["mean_of_rows"], MeanActivation)
    tiny = TINY["qwen2_5_vl"]
    model = type(tiny)(tiny.model, tiny.config, tiny.vision | {"hidden_act": "mean_of_rows"}, tiny.text).build()
    stock = copy.deepcopy(model)
    hf_vit_accel.patch(model, **options)
    assert_close(results(model), results(stock))
    assert any("may mix rows" in reason for reason in hf_vit_accel.status(model).towers[0].fallbacks)


def test_plain_adapters_of_peft_are_known() -> None:
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=r".*visual.blocks.*(qkv|proj)$", use_dora=True)
    model = get_peft_model(TINY["qwen2_5_vl"].build(), config)
    stock = copy.deepcopy(model)
    hf_vit_accel.patch(model, max_rows=40)
    assert_close(results(model.base_model.model), results(stock.base_model.model))
    assert hf_vit_accel.status(model).towers[0].passes is not None
