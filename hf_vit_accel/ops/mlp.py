"""The MLP of a layer: two products with an activation between them, the activation in the first one's kernel or alone.

`T` rows, `E` width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel.families.base import Parts
from hf_vit_accel.ops.activation import ACTIVATIONS, linear_gelu_tanh, pad_swiglu, quick_gelu_, swiglu
from hf_vit_accel.ops.base import Apply, Context, Operation
from hf_vit_accel.ops.launch import why_not_descriptors
from hf_vit_accel.ops.linear_activation import linear_quick_gelu, linear_swiglu
from hf_vit_accel.ops.lora import adapter
from hf_vit_accel.ops.lora.modules import lora_of
from hf_vit_accel.ops.training.gelu_backward import GeluMlp, gelu_mlp_reference
from hf_vit_accel.ops.training.swiglu_backward import SwigluMlp, swiglu_mlp_reference
from hf_vit_accel.ops.training.trained import Trained

KINDS = "gelu_tanh", "quick_gelu", "silu"
"""The activations of layers that there are kernels for."""


def activation_of(activation: Any, context: Context) -> str | None:
    """Which of `ACTIVATIONS` a module computes, by trying; None for another."""
    key = type(activation), activation.extra_repr()
    if key not in context.activations:
        context.activations[key] = _activation_of(activation)
    return context.activations[key]


def _activation_of(activation: Any) -> str | None:
    x = torch.linspace(-6, 6, 97, device="cpu", dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            found = activation.forward(x.clone())
        except Exception:  # whatever a foreign module raises, it is none of them
            return None
        return next((k for k in ACTIVATIONS if torch.allclose(found, ACTIVATIONS[k](x), rtol=1e-6, atol=1e-7)), None)


def layers_of(mlp: Any) -> tuple[list[Any], Any, Any] | None:
    """(products before the activation, activation, product after it), by the names that the families use."""
    for before, activation, after in _NAMES:
        if all(hasattr(mlp, name) for name in (*before, activation, after)):
            return [getattr(mlp, name) for name in before], getattr(mlp, activation), getattr(mlp, after)
    return None


_NAMES = (
    (("gate_proj", "up_proj"), "act_fn", "down_proj"),
    (("linear_fc1",), "act_fn", "linear_fc2"),
    (("fc1",), "act", "fc2"),
    (("fc1",), "activation_fn", "fc2"),
)


def reasons_against(mlp: Any, context: Context) -> list[str]:
    """Why a module is not an MLP that is known: two products with an activation between them, or a SwiGLU."""
    layers = layers_of(mlp)
    reasons = context.reasons_replaced(mlp)
    if reasons or layers is None:
        return reasons or [f"{type(mlp).__name__} is not an MLP that is known"]
    before, activation, after = layers
    for linear in (*before, after):
        if lora_of(linear, context) is None:
            reasons += context.reasons_replaced(linear, nn.Linear)
    missing = [not reasons and linear.bias is None for linear in before]
    if any(missing) and (len(before) == 1 or not all(missing)):
        reasons.append("a Linear of the MLP has no bias")
    reasons = reasons or context.reasons_replaced(activation)
    kind = None if reasons else activation_of(activation, context)
    if not reasons and (kind not in KINDS or (kind == "silu") != (len(before) == 2)):
        reasons.append(f"the activation {type(activation).__name__} is not one that the kernels know for this MLP")
    return reasons


def fused(mlp: Any, context: Context) -> Apply:
    """Rows to what the MLP makes of them; the activation in a kernel."""
    before, activation, after = layers_of(mlp) or ([], None, None)
    assert activation is not None and after is not None
    context.reads.all_of(activation)
    kind, first, limit = activation_of(activation, context), before[0], context.read(mlp, "swiglu_limit")
    loras = [lora_of(each, context) for each in (*before, after)]
    if any(lora is not None and lora.owner is not None for lora in loras):
        *those, lora = filter(None, loras)
        adapted: Apply = adapter.mlp(those, lora, str(kind), limit, context)
        return adapted
    if context.reference or context.grad:
        return _differentiable(before, after, str(kind), limit, context)
    in_one = why_not_descriptors(context.device) is None and first.weight.shape[1] % 8 == 0
    weights = context.reader(*places(before, after))
    if kind == "silu":
        return partial(_linear_swiglu if in_one else _swiglu, weights, limit)
    one = linear_gelu_tanh if kind == "gelu_tanh" else _quick_gelu
    if kind == "quick_gelu" and in_one and first.weight.shape[0] % 8 == 0:
        one = linear_quick_gelu

    def run(x_TE: Tensor) -> Tensor:
        weight_FE, bias_F, weight_EF, bias_E = weights()
        return F.linear(one(x_TE, weight_FE, bias_F), weight_EF, bias_E)

    return run


def _differentiable(before: list[Any], after: Any, kind: str, limit: float | None, context: Context) -> Apply:
    """With a gradient: by kernels that keep little for it or, as reference, in plain torch."""
    weights, setting = context.reader(*places(before, after)), limit if kind == "silu" else kind
    if context.reference:
        reference: Any = swiglu_mlp_reference if kind == "silu" else gelu_mlp_reference
        return lambda x_TE: reference(x_TE, *weights(), setting)
    function = SwigluMlp if kind == "silu" else GeluMlp
    return Trained(function=function, weights=weights, settings=(setting,), takes_norm=True)


def places(before: Sequence[Any], after: Any) -> list[tuple[Any, str]]:
    """Where the weights of an MLP are, in the order in which functions take them."""
    each = [(linear, name) for name in ("weight", "bias") for linear in before]
    return [*each, (after, "weight"), (after, "bias")]


def _quick_gelu(x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    return quick_gelu_(F.linear(x_TE, weight_FE, bias_F))


# Qwen2.5-VL's width of 3420 sends cuBLAS to kernels of a third of the speed (H200, 16384 rows: 616-650 us a product
# against 203 at 3424). So the weights are read where alignment does not matter, or padded with zeros, which change
# nothing, into scratch memory that lives for this layer. Nothing of it is kept, so there is nothing to go stale, and
# the parameters stay as they are for optimizers and checkpoints. (Views of padded storage cost nothing, but
# safetensors, fused optimizers and whoever looks for shared storage take such parameters for something else.)


def _linear_swiglu(weights: Any, limit: float | None, x_TE: Tensor) -> Tensor:
    *first, down_E = weights()
    h_TG, down_EG = linear_swiglu(x_TE, *first, limit=limit)
    return F.linear(h_TG, down_EG, down_E)


def _swiglu(weights: Any, limit: float | None, x_TE: Tensor) -> Tensor:
    gate_FE, up_FE, gate_F, up_F, down_EF, down_E = weights()
    if gate_FE.shape[0] % 8 == 0:
        gate_TF, up_TF = F.linear(x_TE, gate_FE, gate_F), F.linear(x_TE, up_FE, up_F)
        return F.linear(swiglu(gate_TF, up_TF, limit=limit), down_EF, down_E)
    some_F = gate_FE.flatten()[: len(gate_FE)]  # the kernel wants to copy some
    biases = (some_F, some_F) if gate_F is None else (gate_F, up_F)
    weight, bias, down_EG = pad_swiglu(gate_FE, up_FE, *biases, down_EF)
    h_TG = swiglu(*F.linear(x_TE, weight, None if gate_F is None else bias).chunk(2, dim=-1), limit=limit)
    return F.linear(h_TG, down_EG, down_E)


def routed(mlp: nn.Module) -> bool:
    """Whether it is a mixture of experts; those are called as modules."""
    return hasattr(mlp, "experts")


def _subjects(parts: Parts) -> list[nn.Module]:
    return [block.mlp for block in parts.blocks if not routed(block.mlp)]


OPERATION = Operation(
    name="mlp",
    summary="the activation in its product's kernel, or as one of its own",
    subjects=_subjects,
    reasons_against=reasons_against,
    fused=fused,
    plain=lambda mlp, context: context.called(mlp),
    missing="every layer has a mixture of experts",
)
