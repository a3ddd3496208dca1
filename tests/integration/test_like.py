"""Test `patch(like=...)`: copies of towers from remote code are served, and sabotaged copies are refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from support import copies
from support.copies import COPIES, build, tensors_of
from tiny import assert_close, pixels_for
from torch import Tensor, nn

import hf_vit_accel
from hf_vit_accel.status import TowerStatus

GRID = [(1, 4, 6), (2, 8, 10), (1, 2, 18)]
TALL = [(1, 44, 24)]
HALF = torch.bfloat16


def run(tower: nn.Module, grid: list[tuple[int, int, int]] = GRID, **options: object) -> list[Tensor]:
    weight = tower.patch_embed.proj.weight
    pixels = pixels_for(tower, grid, dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        return tensors_of(tower(pixels, torch.tensor(grid), **options))


def gradients(tower: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters for a random weighting of the outputs."""
    outputs = tensors_of(tower(pixels_for(tower, GRID), grid_thw=torch.tensor(GRID)))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(output.shape, generator=generator) for output in outputs]
    return list(torch.autograd.grad(outputs, list(tower.parameters()), weights))


def status_of(model: nn.Module) -> TowerStatus:
    [status] = hf_vit_accel.status(model).towers
    return status


# --- sabotaged copies -------------------------------------------------------------------------------------------------

REFUSED = {
    "ActsAboveASize": ("qwen2_5_vl", r"large images \(\d+ rows\) in eval mode"),
    "ActsAboveARowCount": ("qwen2_5_vl", r"large images \(1\d\d\d rows\) in eval mode"),
    "ActsFromLayer4": ("qwen3_vl", r"from layer 4 on"),
    "ActsInTraining": ("qwen2_vl", r"in training mode, from layer 0 on"),
    "ScalesABit": ("qwen2_vl", r"features in float32: relative error (1\.0e-03|9\.\de-04)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_sabotaged_copy_is_refused_with_the_number(name: str) -> None:
    family, where = REFUSED[name]
    tower = build(getattr(copies, name))
    expected = run(tower)
    attributes = vars(tower).keys()
    with pytest.raises(ValueError, match=f"{name} is no copy of {family}: ") as caught:
        hf_vit_accel.patch(tower, like={name: family})
    assert re.search(where, str(caught.value)), caught.value
    assert re.search(r"relative error \d\.\de-\d\d, at most 1e-0[34] is rounding", str(caught.value))
    assert vars(tower).keys() == attributes, "nothing is patched"
    assert_close(run(tower), expected, 0.0)


def test_a_copy_that_acts_in_bf16_is_refused_in_bf16_alone() -> None:
    """fp32 calls are fast; the first call in bf16 runs the proof for that dtype."""
    tower = build(copies.ActsInBf16)
    hf_vit_accel.patch(tower, like={"ActsInBf16": "qwen2_vl"})
    run(tower)
    assert (status_of(tower).calls, status_of(tower).stock_calls) == (1, 0)
    stock = copy.deepcopy(tower)
    hf_vit_accel.unpatch(stock)
    stock.to(HALF)
    tower.to(HALF)
    with pytest.warns(UserWarning, match=r"features in bfloat16: error \d\.\de-\d\d against fp32"):
        results = run(tower)
    assert_close(results, run(stock), 0.0)
    assert status_of(tower).stock_calls == 1
    with pytest.raises(ValueError, match="in bfloat16"):
        hf_vit_accel.patch(stock, like={"ActsInBf16": "qwen2_vl"})


def test_a_copy_that_acts_under_autocast_is_refused_there() -> None:
    tower = build(copies.ActsUnderAutocast)
    stock = copy.deepcopy(tower)
    hf_vit_accel.patch(tower, like={"ActsUnderAutocast": "qwen2_vl"})
    run(tower)
    with torch.autocast("cpu", dtype=HALF):
        assert_close(run(tower), run(stock), 0.0)
    [reason] = status_of(tower).fallbacks
    assert re.search(r"features in float32 under autocast to bfloat16: error \d\.\de-\d\d", reason)
    run(tower)
    assert (status_of(tower).calls, status_of(tower).stock_calls) == (2, 1)


def test_a_buffer_that_is_loaded_later_is_noticed() -> None:
    tower = build(copies.ActsByABuffer)
    stock = copy.deepcopy(tower)
    hf_vit_accel.patch(tower, like={"ActsByABuffer": "qwen3_vl"})
    run(tower)
    checkpoint = stock.state_dict() | {"bonus": torch.linspace(0, 0.1, 32)}
    for model in (tower, stock):
        model.load_state_dict(checkpoint)
    with pytest.warns(UserWarning, match=r"ActsByABuffer is no copy of qwen3_vl: .* relative error \d\.\de-\d\d"):
        results = run(tower)
    assert_close(results, run(stock), 0.0)
    status = status_of(tower)
    assert (status.calls, status.stock_calls, status.rebuild_reason) == (1, 1, "a buffer changed")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_integer_of_the_config_is_noticed(moment: str) -> None:
    like = {"ActsByTheConfig": "qwen2_5_vl"}
    if moment == "before":
        with pytest.raises(ValueError, match=r"relative error \d\.\de-\d\d"):
            hf_vit_accel.patch(build(copies.ActsByTheConfig, boost=1), like=like)
        return
    tower = build(copies.ActsByTheConfig)
    stock = copy.deepcopy(tower)
    hf_vit_accel.patch(tower, like=like)
    run(tower)
    for model in (tower, stock):
        model.config.boost = 1
    with pytest.warns(UserWarning, match=r"relative error \d\.\de-\d\d"):
        results = run(tower)
    assert_close(results, run(stock), 0.0)
    assert status_of(tower).rebuild_reason == "a field of a config changed"


# --- copies that are served -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "version"), COPIES)
def test_a_copy_is_served(family: str, version: str) -> None:
    """Outputs, their classes and gradients are those of the copy."""
    kind = COPIES[family, version]
    tower = build(kind)
    stock = copy.deepcopy(tower)
    hf_vit_accel.patch(tower, like={kind.__name__: family})
    for grid in (GRID, TALL):
        assert_close(run(tower, grid), run(stock, grid), 3e-6)
    pixels = pixels_for(tower, GRID)
    grid_thw = torch.tensor(GRID)
    assert type(tower(pixels, grid_thw)) is type(stock(pixels, grid_thw))
    ours = gradients(tower)
    expected = gradients(stock)
    scale = max(float(x.norm()) for x in expected)
    assert max(float((x - y).norm()) for x, y in zip(ours, expected, strict=True)) <= 1e-5 * scale
    status = status_of(tower)
    assert (status.calls, status.stock_calls, status.against_fast) == (4, 0, ())
    assert (status.family, status.like) == (family, kind.__name__)
    assert "largest relative errors: outputs in float32" in str(status)
    hf_vit_accel.unpatch(tower)
    assert_close(run(tower), run(stock), 0.0)
