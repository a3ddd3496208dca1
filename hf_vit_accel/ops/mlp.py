"""The MLP of a layer: two products with an activation between them, in the first product's kernel or in its own.

`T` rows, `E` width, `F` width of the MLP, `G` that width rounded up to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel.families.base import Part, Parts
from hf_vit_accel.ops.activation import ACTIVATIONS, linear_gelu_tanh, pad_swiglu, quick_gelu_, swiglu
from hf_vit_accel.ops.base import Apply, Context, Operation, ReadWeights
from hf_vit_accel.ops.launch import why_not_descriptors
from hf_vit_accel.ops.linear_swiglu import linear_swiglu
from hf_vit_accel.ops.lora import Lora, lora_of
from hf_vit_accel.ops.lora import reasons_against as lora_reasons
from hf_vit_accel.ops.training import mlp as trained_mlp

KINDS = "gelu_tanh", "quick_gelu", "silu"
"""The activations of layers for which there are kernels."""


def activation_of(activation: nn.Module, context: Context) -> str | None:
    """Return the name of `ACTIVATIONS` that a module computes, by trying it; None for any other function."""
    key = type(activation), getattr(activation.forward, "__func__", None), activation.extra_repr()
    if key not in context.activations:
        kind = _try_activation(activation, torch.device("cpu"))
        context.activations[key] = kind or _try_activation(activation, context.device)  # kernels run on a GPU only
    return context.activations[key]


def _try_activation(activation: nn.Module, device: torch.device) -> str | None:
    x = torch.linspace(-6, 6, 97, device=device, dtype=torch.float32)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        try:
            y = activation.forward(x.clone())
        except Exception:  # a third-party module may raise anything
            return None
        for kind, function in ACTIVATIONS.items():
            if torch.allclose(y, function(x), rtol=1e-6, atol=1e-7):
                return kind
    return None


def layers_of(mlp: Part) -> tuple[list[Part], Part, Part] | None:
    """Return (Linears before the activation, activation, Linear after it), by the attribute names of the families."""
    for before, activation, after in _NAMES:
        if all(hasattr(mlp, name) for name in (*before, activation, after)):
            return [getattr(mlp, name) for name in before], getattr(mlp, activation), getattr(mlp, after)
    if all(hasattr(mlp, name) for name in ("fc1", "fc3", "fc2")):  # the code of dots.ocr calls silu, a function
        return [mlp.fc1, mlp.fc3], _SILU, mlp.fc2
    return None


_SILU = nn.SiLU()
_NAMES = (
    (("gate_proj", "up_proj"), "act_fn", "down_proj"),
    (("linear_fc1",), "act_fn", "linear_fc2"),
    (("fc1",), "act", "fc2"),
    (("fc1",), "activation_fn", "fc2"),
)


def reasons_against(mlp: Part, context: Context) -> list[str]:
    """Report why a module is neither two products with an activation between them nor a SwiGLU."""
    layers = layers_of(mlp)
    reasons = context.reasons_replaced(mlp)
    if reasons or layers is None:
        return reasons or [f"{type(mlp).__name__} is not an MLP that is known"]
    before, activation, after = layers
    for linear in (*before, after):
        reasons += lora_reasons(linear, context)
    if reasons:
        return reasons
    missing = [linear.bias is None for linear in before]
    if any(missing) and (len(before) == 1 or not all(missing)):
        return ["a Linear of the MLP has no bias"]
    reasons = [] if activation is _SILU else context.reasons_replaced(activation)
    if reasons:
        return reasons
    kind = activation_of(activation, context)
    if kind not in KINDS or (kind == "silu") != (len(before) == 2):
        return [f"the activation {type(activation).__name__} is not one that the kernels know for this MLP"]
    return []


def fused(mlp: Part, context: Context) -> Apply:
    """Build an MLP whose activation is computed by a kernel."""
    layers = layers_of(mlp)
    assert layers is not None
    before, activation, after = layers
    context.watch.read_all(activation)
    kind = str(activation_of(activation, context))
    limit = context.read(mlp, "swiglu_limit")
    loras: list[Lora] = []
    for linear in (*before, after):
        lora = lora_of(linear, context)
        if lora is not None:
            loras.append(lora)
    if context.reference or context.grad or any(lora.owner is not None for lora in loras):
        return trained_mlp.build(loras[:-1], loras[-1], kind, limit, context)
    names = [*((linear, "weight") for linear in before), *((linear, "bias") for linear in before)]
    weights = context.reader(*names, (after, "weight"), (after, "bias"))
    if kind == "gelu_tanh":
        return _gelu(weights, linear_gelu_tanh)
    if kind == "quick_gelu":
        return _gelu(weights, _linear_quick_gelu)
    fits_descriptors = why_not_descriptors(context.device) is None and before[0].weight.shape[1] % 8 == 0
    return _swiglu_in_one_launch(weights, limit) if fits_descriptors else _swiglu(weights, limit)


def _gelu(weights: ReadWeights, linear_activation: Callable[..., Tensor]) -> Apply:
    def run(x_TE: Tensor) -> Tensor:
        weight_FE, bias_F, weight_EF, bias_E = weights()
        return F.linear(linear_activation(x_TE, weight_FE, bias_F), weight_EF, bias_E)

    return run


def _linear_quick_gelu(x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    return quick_gelu_(F.linear(x_TE, weight_FE, bias_F))


# Qwen2.5-VL's width of 3420 sends cuBLAS to kernels of a third of the speed (H200, 16384 rows: 616-650 us a product
# against 203 at 3424). So either the kernel reads weights whose alignment does not matter, or the weights are padded
# with zeros into scratch memory of this layer. Parameters stay as they are, and no copy is kept that could go stale.
# (Parameters as views of padded storage would cost nothing, but safetensors and fused optimizers reject them.)


def _swiglu_in_one_launch(weights: ReadWeights, limit: float | None) -> Apply:
    def run(x_TE: Tensor) -> Tensor:
        *first, down_E = weights()
        h_TG, down_EG = linear_swiglu(x_TE, *first, limit=limit)
        return F.linear(h_TG, down_EG, down_E)

    return run


def _swiglu(weights: ReadWeights, limit: float | None) -> Apply:
    def run(x_TE: Tensor) -> Tensor:
        gate_FE, up_FE, gate_F, up_F, down_EF, down_E = weights()
        if gate_FE.shape[0] % 8 == 0:
            gate_TF = F.linear(x_TE, gate_FE, gate_F)
            up_TF = F.linear(x_TE, up_FE, up_F)
            return F.linear(swiglu(gate_TF, up_TF, limit=limit), down_EF, down_E)
        weight, bias, down_EG = pad_swiglu(gate_FE, up_FE, gate_F, up_F, down_EF)
        gate_and_up = F.linear(x_TE, weight, bias).chunk(2, dim=-1)
        h_TG = swiglu(*gate_and_up, limit=limit)
        del gate_and_up
        return F.linear(h_TG, down_EG, down_E)

    return run


def is_mixture_of_experts(mlp: nn.Module) -> bool:
    """Return whether an MLP is a mixture of experts, which is called as a module."""
    return hasattr(mlp, "experts")


def _subjects(parts: Parts) -> list[nn.Module]:
    return [block.mlp for block in parts.blocks if not is_mixture_of_experts(block.mlp)]


OPERATION = Operation(
    name="mlp",
    summary="the activation in its product's kernel, or as one of its own",
    subjects=_subjects,
    reasons_against=reasons_against,
    fused=fused,
    plain=lambda mlp, context: context.called(mlp),
    missing="every layer has a mixture of experts",
)
