"""Code of the user's that mixes rows of several images, in places where no module of the user's stands."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from support import quantised, substitutes
from support.towers import alike
from tiny import TINY, assert_close, merged_of, outputs_of, pixels_for, tower_of
from torch import nn
from transformers.activations import ACT2FN

import hf_vit_accel

GRID = [(1, 4, 4)] * 3
OPTIONS = ({"max_rows": 40}, {"reuse": True})


def mean_activation(rows: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(rows) * (1 + rows.mean())


def exchange_by_function(tower: Any) -> None:
    for block in tower.blocks:
        del block.mlp.act_fn
        block.mlp.act_fn = mean_activation


def count_rows_in_gradients(tower: Any) -> None:
    tower.pos_embed.scale_grad_by_freq = True


CHANGES = exchange_by_function, count_rows_in_gradients


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


@pytest.mark.parametrize("options", alike(*OPTIONS), ids=["max_rows", "reuse"])
def test_an_activation_that_is_registered_with_transformers(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny tower of a proof has it, too, but that proves nothing about rows."""
    monkeypatch.setitem(ACT2FN, "rows", substitutes.RowsActivation)
    tiny = TINY["qwen2_5_vl"]
    model = replace(tiny, vision=tiny.vision | {"hidden_act": "rows"}).build()
    stock = copy.deepcopy(model)
    hf_vit_accel.patch(model, **options)
    assert_close(results(model), results(stock))
    assert any("may mix rows" in reason for reason in hf_vit_accel.status(model).towers[0].fallbacks)


METHODS: dict[str, dict[str, Any]] = {
    "AdaLora": dict(total_step=10),
    "BOFT": dict(boft_block_size=2, init_weights=False),
    "HRA": dict(init_weights=False),
    "IA3": dict(feedforward_modules=[]),
    "LoHa": dict(init_weights=False),
    "LoKr": dict(init_weights=False),
    "Lora": dict(lora_dropout=0.0, modules_to_save=["merger"]),
    "Lora with DoRA": dict(use_dora=True),
    "OFT": dict(oft_block_size=2, r=0, init_weights=False),
    "Vera": {},
}
"""Methods of PEFT, with options that tiny models need."""


COMMON = "IA3", "Lora", "Lora with DoRA", "OFT"


@pytest.mark.parametrize(
    "method", [pytest.param(method, marks=[pytest.mark.matrix] * (method not in COMMON)) for method in METHODS]
)
def test_adapters_that_treat_each_row_by_itself_run_in_passes(method: str) -> None:
    """None of them is known by name: a trial tells."""
    kind = getattr(peft, f"{method.split()[0]}Config")
    config = kind(target_modules=r".*visual.blocks.*(qkv|proj)$", **METHODS[method])
    model = peft.get_peft_model(TINY["qwen2_5_vl"].build(), config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    stock = copy.deepcopy(model)
    hf_vit_accel.patch(model, max_rows=40)
    assert_close(results(model.base_model.model), results(stock.base_model.model))
    assert hf_vit_accel.status(model).towers[0].passes is not None


class OfOneScale(nn.Linear):
    """Scale all rows of a call by the largest value, and round: float8 and 8-bit linears do the like."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scale = rows.detach().abs().amax() / 127
        return super().forward(rows + (rows / scale).detach().round() * scale - rows.detach())


class OfOutliers(nn.Linear):
    """Round all columns but those in which any row has an outlier, as `LLM.int8()` does."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scale = rows.detach().abs().amax(-1, keepdim=True) / 127
        rounded = (rows / scale).detach().round() * scale
        is_kept = rows.detach().abs().amax(0) > 6
        return super().forward(rows + torch.where(is_kept, rows, rounded).detach() - rows.detach())


class GradientOfAll(nn.Linear):
    """Give all rows the mean gradient."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mean = rows.mean(0, keepdim=True)
        return super().forward(rows.detach() + mean - mean.detach())


@pytest.mark.parametrize("kind", [OfOneScale, OfOutliers, GradientOfAll])
@pytest.mark.parametrize("options", alike(*OPTIONS), ids=["max_rows", "reuse"])
def test_linears_that_mix_rows(kind: type[nn.Linear], options: dict[str, Any]) -> None:
    model = TINY["qwen2_5_vl"].build()
    for block in tower_of(model).blocks:
        block.attn.proj.__class__ = kind
    stock = copy.deepcopy(model)
    hf_vit_accel.patch(model, **options)
    assert_close(results(model), results(stock))
    assert any("may mix rows" in reason for reason in hf_vit_accel.status(model).towers[0].fallbacks)


@pytest.mark.parametrize("threshold", [None, 0.0, 6.0], ids=["4 bit", "8 bit", "8 bit with outliers"])
def test_linears_of_bitsandbytes(threshold: float | None) -> None:
    """`load_in_8bit` looks for outliers among all rows, with a threshold of 6."""
    pytest.importorskip("bitsandbytes")
    way = quantised.bitsandbytes_4bit if threshold is None else quantised.bitsandbytes_8bit
    model = way(TINY["qwen2_5_vl"].build().bfloat16(), ExitStack()).eval()
    for module in model.modules():
        if threshold is not None and hasattr(module, "state"):
            module.state.threshold = threshold
    tower = tower_of(hf_vit_accel.patch(model, max_rows=40))
    with torch.no_grad():
        tower(pixels_for(tower, GRID).bfloat16(), grid_thw=torch.tensor(GRID))
    [status] = hf_vit_accel.status(model).towers
    assert status.calls == 1 and (status.passes is not None) == (threshold != 6.0), str(status)


class OfTwoKernels(nn.Linear):
    """Round the weight of many rows and not of few, as `gemm_4bit` of bitsandbytes on a GPU does."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() // rows.shape[-1] > 100:
            return super().forward(rows)
        weight = self.weight.float()
        weight = weight + 6e-3 * (weight * torch.sin(1e5 * weight)).detach()  # 0.54 eps of bf16, as measured on an H200
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(rows.float(), weight, bias).to(rows.dtype)


def test_a_linear_whose_kernel_rounds_otherwise_for_few_rows_runs_in_passes() -> None:
    model = TINY["qwen2_5_vl"].build().bfloat16().eval()
    for block in tower_of(model).blocks:
        block.attn.proj.__class__ = OfTwoKernels
    tower = tower_of(hf_vit_accel.patch(model, max_rows=40))
    with torch.no_grad():
        tower(pixels_for(tower, GRID).bfloat16(), grid_thw=torch.tensor(GRID))
    [status] = hf_vit_accel.status(model).towers
    assert status.passes is not None, status


def test_dynamic_quantisation_mixes_rows() -> None:
    """Its scale depends on all rows of a call."""
    model = TINY["qwen2_5_vl"].build().eval()
    with pytest.warns(DeprecationWarning):
        blocks = torch.ao.quantization.quantize_dynamic(tower_of(model).blocks, {nn.Linear}, dtype=torch.qint8)
    tower_of(model).blocks = blocks
    tower = tower_of(hf_vit_accel.patch(model, max_rows=40))
    with torch.no_grad():
        tower(pixels_for(tower, GRID), grid_thw=torch.tensor(GRID))
    assert hf_vit_accel.status(model).towers[0].passes is None


def _mix(x: torch.Tensor, share: float) -> torch.Tensor:
    return torch.nn.functional.gelu(x) + share * x.mean(0, keepdim=True)


class _Holder:
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return _mix(x, 0.5)


@pytest.mark.parametrize("activation", [functools.partial(_mix, share=0.5), _Holder().mix, lambda x: _mix(x, 0.5)])
def test_an_activation_that_is_a_partial_or_a_method_gets_all_rows(activation: Any) -> None:
    """As users exchange an activation for a fused one: `mlp.act_fn = functools.partial(...)`."""
    tower = tower_of(TINY["qwen3_vl"].build()).eval().requires_grad_(False)
    mlp = tower.blocks[0].mlp
    del mlp.act_fn
    mlp.act_fn = activation
    weight = next(value for name, value in tower.named_parameters() if "patch_embed" in name)
    grid = torch.tensor([[1, 8, 8], [1, 8, 8], [1, 4, 8]])
    pixels = torch.randn(160, weight[0].numel())
    expected = tower(pixels, grid).pooler_output
    hf_vit_accel.patch(tower, max_rows=64)
    torch.testing.assert_close(tower(pixels, grid).pooler_output, expected, atol=1e-4, rtol=1e-4)
    assert any("may mix rows" in reason for reason in hf_vit_accel.status(tower).towers[0].fallbacks)
