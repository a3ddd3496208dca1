"""Change a tower between forward and backward, under `max_rows`: gradients are those of the forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.towers import alike
from tiny import TINY, outputs_of, pixels_for, relative_error, tower_of

import hf_vit_accel

GRID = [(1, 4, 6), (7, 4, 4), (1, 2, 18)]
FAMILIES = ["qwen2_5_vl", "qwen3_vl"]


def loss_of(tower: Any, pixels: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum of the squares of all outputs."""
    pixels = pixels_for(tower, GRID) if pixels is None else pixels
    loss: Any = sum(output.square().sum() for output in outputs_of(tower(pixels, grid_thw=torch.tensor(GRID))))
    return loss  # type: ignore[no-any-return]


def patched(stock: Any) -> Any:
    """Return a patched copy that encodes in passes."""
    return hf_vit_accel.patch(copy.deepcopy(stock), max_rows=50, strict=True)


def assert_same_gradients(tower: Any, stock: Any) -> None:
    """Compare the gradients of two towers, of which one encoded in passes."""
    assert hf_vit_accel.status(tower).towers[0].passes
    for (name, parameter), expected in zip(tower.named_parameters(), stock.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            assert relative_error(parameter.grad, expected.grad) < 1e-4, name


# --- buffers ----------------------------------------------------------------------------------------------------------


def write(tower: Any) -> None:
    """Write to the frequencies of the rotation."""
    with torch.no_grad():
        tower.rotary_pos_emb.inv_freq.mul_(0.5)


def write_data(tower: Any) -> None:
    """Write to the frequencies past their version counter."""
    tower.rotary_pos_emb.inv_freq.data.mul_(0.5)


def assign(tower: Any) -> None:
    """Assign other frequencies."""
    tower.rotary_pos_emb.inv_freq = tower.rotary_pos_emb.inv_freq * 0.5


@pytest.mark.parametrize("is_buffer", alike(True, False), ids=["buffer", "plain attribute"])
@pytest.mark.parametrize("change", [write, write_data, assign])
@pytest.mark.parametrize("family", alike(*FAMILIES))
def test_frequencies_changed_before_the_backward(family: str, change: Callable[[Any], None], is_buffer: bool) -> None:
    stock = tower_of(TINY[family].build())
    if not is_buffer:
        vars(stock.rotary_pos_emb)["inv_freq"] = stock.rotary_pos_emb._buffers.pop("inv_freq")
    tower = patched(stock)
    for model in (tower, stock):
        loss = loss_of(model)
        change(model)
        now = getattr(model.rotary_pos_emb, "inv_freq", None)
        loss.backward()
        assert getattr(model.rotary_pos_emb, "inv_freq", None) is now
    assert_same_gradients(tower, stock)


# --- pixels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", ["weights", "pixels"])
def test_pixels_that_a_gradient_needs_may_not_be_overwritten(needs: str) -> None:
    tower = patched(tower_of(TINY["qwen3_vl"].build()))
    tower.patch_embed.requires_grad_(needs == "weights")
    pixels = pixels_for(tower, GRID).requires_grad_(needs == "pixels")
    loss = loss_of(tower, pixels)
    with torch.no_grad():
        pixels.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("trains_first", [True, False])
@pytest.mark.parametrize("family", alike(*FAMILIES))
def test_dropout_of_adapters_acts_as_in_the_forward(family: str, trains_first: bool) -> None:
    """Change the model's mode before the backward: our masks stay those of the forward, and stock draws others."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, lora_dropout=0.5, init_lora_weights=False, target_modules=r".*visual\.blocks.*(qkv|proj)$"
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(TINY[family].build(), config)
    hf_vit_accel.patch(model, max_rows=50, strict=True)
    gradients = []
    for changes_mode in (False, True):
        model.zero_grad()
        model.train(trains_first)
        torch.manual_seed(1)
        loss = loss_of(tower_of(model))
        if changes_mode:
            model.train(not trains_first)
        loss.backward()
        assert model.training == (trains_first != changes_mode)
        assert all(module.training == model.training for module in tower_of(model).modules())
        gradients.append([p.grad.clone() for p in tower_of(model).parameters() if p.grad is not None])
    assert gradients[0]
    for gradient, expected in zip(gradients[1], gradients[0], strict=True):
        assert torch.equal(gradient, expected)
