"""Code of the user's that mixes rows of several images, in places where no module of the user's stands."""

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


def results(model: nn.Module) -> list[torch.Tensor]:
    tower = tower_of(model)
    pixels = pixels_for(tower, GRID)
    pixels[16:32] = pixels[:16]  # two equal pictures
    output = tower(pixels, grid_thw=torch.tensor(GRID))
    outputs = outputs_of(output)
    merged_of(output).square().sum().backward()
    gradients = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
    return [*(output.detach() for output in outputs), *gradients]


def mean_activation(rows: torch.Tensor, share: float = 1.0) -> torch.Tensor:
    return nn.functional.silu(rows) * (1 + share * rows.mean())


class Holder:
    def mix(self, rows: torch.Tensor) -> torch.Tensor:
        return mean_activation(rows)


class OfOneScale(nn.Linear):
    """Scale all rows of a call by the largest value, and round: float8 and dynamic 8-bit linears do the like."""

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


def exchange_activations(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Return a change as users exchange an activation for a fused one: `mlp.act_fn = functools.partial(...)`."""

    def exchange(tower: Any) -> None:
        for block in tower.blocks:
            del block.mlp.act_fn
            block.mlp.act_fn = activation

    return exchange


def exchange_linears(kind: type[nn.Linear]) -> Callable[[Any], None]:
    def exchange(tower: Any) -> None:
        for block in tower.blocks:
            block.attn.proj.__class__ = kind

    return exchange


def count_rows_in_gradients(tower: Any) -> None:
    tower.pos_embed.scale_grad_by_freq = True


CHANGES: dict[str, Callable[[Any], None]] = {
    "a function": exchange_activations(mean_activation),
    "a partial": exchange_activations(functools.partial(mean_activation, share=0.5)),
    "a method": exchange_activations(Holder().mix),
    "gradients by frequency": count_rows_in_gradients,
    "linears of one scale": exchange_linears(OfOneScale),
    "linears of outliers": exchange_linears(OfOutliers),
    "linears of one gradient": exchange_linears(GradientOfAll),
}


def check_all_rows(model: nn.Module, options: dict[str, Any]) -> None:
    """Compare a model with stock, and check that its calls were not divided."""
    stock = copy.deepcopy(model)
    hf_vit_accel.patch(model, **options)
    assert_close(results(model), results(stock))
    assert any("may mix rows" in reason for reason in hf_vit_accel.status(model).towers[0].fallbacks)


@pytest.mark.parametrize("options", alike(*OPTIONS), ids=["max_rows", "reuse"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_put_into_a_tower_gets_all_rows(name: str, options: dict[str, Any]) -> None:
    model = TINY["qwen3_vl" if name == "gradients by frequency" else "qwen2_5_vl"].build()
    CHANGES[name](tower_of(model))
    check_all_rows(model, options)


@pytest.mark.parametrize("options", OPTIONS, ids=["max_rows", "reuse"])
def test_an_activation_that_is_registered_with_transformers(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny tower of a proof has it, too, but that proves nothing about rows."""
    monkeypatch.setitem(ACT2FN, "rows", substitutes.RowsActivation)
    tiny = TINY["qwen2_5_vl"]
    check_all_rows(replace(tiny, vision=tiny.vision | {"hidden_act": "rows"}).build(), options)


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


def runs_in_passes(model: nn.Module) -> bool:
    """Return whether a fast call in bf16 is cut into passes."""
    tower = tower_of(hf_vit_accel.patch(model, max_rows=40))
    with torch.no_grad():
        tower(pixels_for(tower, GRID).bfloat16(), grid_thw=torch.tensor(GRID))
    [status] = hf_vit_accel.status(model).towers
    assert status.calls == 1, str(status)
    return status.passes is not None


@pytest.mark.parametrize("threshold", [None, 0.0, 6.0], ids=["4 bit", "8 bit", "8 bit with outliers"])
def test_linears_of_bitsandbytes(threshold: float | None) -> None:
    """`load_in_8bit` looks for outliers among all rows, with a threshold of 6."""
    pytest.importorskip("bitsandbytes")
    way = quantised.bitsandbytes_4bit if threshold is None else quantised.bitsandbytes_8bit
    model = way(TINY["qwen2_5_vl"].build().bfloat16(), ExitStack()).eval()
    for module in model.modules():
        if threshold is not None and hasattr(module, "state"):
            module.state.threshold = threshold
    assert runs_in_passes(model) == (threshold != 6.0)


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
    assert runs_in_passes(model)
