"""The linears of a tower in FP8, for many rows: what takes the place of its operations where that is asked for.

Weights are quantised at every call, right before their product: at 16384 rows of Qwen3-VL that is 2% of the time, and
nothing is kept that could be stale, by whatever means weights change (an optimizer, `weight.data += delta` as PEFT
merges, a graph's replay). A copy that is kept could be checked against them only by reading all of them as well.

`T` rows, `E` width, `F` width of an MLP, `N` columns of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families.base import Block
from hf_vit_accel.ops import merger as mergers
from hf_vit_accel.ops import mlp as mlps
from hf_vit_accel.ops import norm as norms
from hf_vit_accel.ops import scaled
from hf_vit_accel.ops.base import Context, filled
from hf_vit_accel.ops.launch import why_not_triton
from hf_vit_accel.ops.scaled import MULTIPLE, Quantized, aligned

MIN_ROWS = 12288
"""Rows from which on it is faster: what weights and launches cost does not grow with them, what is gained does.

H200, linears of a layer of Qwen3-VL-8B, bf16 and FP8, us: 233 and 236 (4096 rows), 725 and 614 (14416), 817 and 664
(16384); whole towers at 4096 rows take 13 and 24 ms, since the host launches twice as much.
"""

CAPABILITY = 8, 9
"""The lowest compute capability that has them."""

Rows = Callable[[Any], Tensor]


def why_not(device: torch.device, dtype: torch.dtype, *, grad: bool) -> str | None:
    """Why no product of rows in a dtype can be in FP8; None if they can."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}, products in FP8 need CUDA"
    if (found := machine.cuda_capability(device.index)) < CAPABILITY:
        return f"the GPU's compute capability is {found[0]}.{found[1]}, products in FP8 need at least 8.9"
    if dtype != torch.bfloat16:
        return f"the dtype is {str(dtype).removeprefix('torch.')}, products in FP8 write bfloat16"
    return "gradients are required, products in FP8 have none" if grad else why_not_triton(device, dtype)


def _against(
    modules: Sequence[Any], context: Context, *, takes_padded: bool = False, gives_padded: bool = False
) -> str | None:
    """Why modules are no Linears, or of widths that products do not take, but where what is around them pads."""
    for module in modules:
        if reasons := context.reasons_replaced(module, nn.Linear):
            return reasons[0]
        outer, inner = module.weight.shape
        if (inner % MULTIPLE and not takes_padded) or (outer % MULTIPLE and not gives_padded):
            return f"the widths of a Linear, {inner} to {outer}, are no multiples of {MULTIPLE}"
    return None


def _product(modules: Sequence[Any], dtype: torch.dtype, *, biased: bool = True) -> Rows:
    """Rows in e4m3 to what Linears make of them, side by side, each padded to `aligned(N)`; biased: with biases."""

    def run(x: Quantized) -> Tensor:
        sizes = [aligned(len(module.weight)) for module in modules]
        whole = scaled.empty(modules[0].weight, sum(sizes), aligned(modules[0].weight.shape[1]))
        for module, *out in zip(modules, *(tensor.split(sizes) for tensor in whole), strict=True):
            scaled.quantize_rows(module.weight, Quantized(*out))
        return scaled.product(x, whole, _biases(modules, dtype) if biased else None, dtype)

    return run


def _biases(modules: Sequence[Any], dtype: torch.dtype) -> Tensor | None:
    some = filled([module.weight for module in modules], [module.bias for module in modules])
    return None if some is None else (some[0] if len(some) == 1 else torch.cat(some)).to(dtype)


def _mlp(before: Sequence[Any], kind: str, after: Any, limit: float | None, dtype: torch.dtype) -> Rows:
    """Rows in e4m3 to what two products make of them, with an activation between: its kernel adds the first biases."""
    first, last = _product(before, dtype, biased=False), _product((after,), dtype)

    def run(x: Quantized) -> Tensor:
        biases = tuple(module.bias for module in before)
        return last(scaled.activate(first(x), biases, len(before[0].weight), kind, limit))

    return run


def _fits(part: str, context: Context, against: dict[str, str], *whys: str | None) -> bool:
    """Whether a part is asked for and nothing is against it; `against` receives what is."""
    if part in context.linears and (why := next(filter(None, whys), None)):
        against[part] = why
        return False
    return part in context.linears


def layer(block: Block, made: Any, shape: Callable[..., Any] | None, context: Context, against: dict[str, str]) -> Any:
    """A layer (`LayerOps`) with its linears in FP8. shape: what its heads go through after the first product.

    against: receives why parts of it are not.
    """
    changes: dict[str, Any] = {}
    not_normed = None if "norms" in context.fused else "its norms are not fused"
    if _fits("qkv", context, against, not_normed, _against(block.qkv, context)):
        qkv = _guarded(_product(block.qkv, context.dtype))
        changes |= {"norm1": _guarded(norms.fused(block.norm1, context, scaled.add_norm_e4m3_))}
        changes |= {"qkv": qkv if shape is None else lambda x: shape(qkv(x))}
    if _fits("proj", context, against, _against((block.proj,), context, takes_padded=True)):
        proj = _product((block.proj,), context.dtype)
        changes |= {"proj": _guarded(lambda x_TE: proj(scaled.quantize_rows(x_TE)))}
    if mlps.routed(block.mlp):
        return replace(made, **changes)
    before, activation, after = mlps.layers_of(block.mlp) or ([], None, None)
    why = not_normed or (None if "mlp" in context.fused else "it is not fused")
    why = why or _against(before, context, gives_padded=True)
    if _fits("mlp", context, against, why, _against((after,), context, takes_padded=True)):
        kind, limit = mlps.activation_of(activation, context), context.read(block.mlp, "swiglu_limit")
        changes |= {"norm2": _guarded(norms.fused(block.norm2, context, scaled.add_norm_e4m3_))}
        changes |= {"mlp": _guarded(_mlp(before, str(kind), after, limit, context.dtype))}
    return replace(made, **changes)


def merger(module: Any, made: Any, context: Context, against: dict[str, str]) -> Any:
    """A merger with its products in FP8; against: receives why it is not."""
    _, rest = mergers.layers_of(module) or (None, [])
    kind = mlps.activation_of(rest[1], context) if len(rest) == 3 and not context.reasons_replaced(rest[1]) else None
    why = None if "mergers" in context.fused else "it is not fused"
    why = why or (None if len(rest) == 3 else "it is not two products with an activation between them")
    why = why or _against(rest[:1], context, takes_padded=True, gives_padded=True)
    why = why or _against(rest[2:], context, takes_padded=True)
    if why is None and kind in (None, "silu"):
        why = f"the activation {type(rest[1]).__name__} is not one that the kernel knows"
    if not _fits("mergers", context, against, why):
        return made
    run = _mlp(rest[:1], str(kind), rest[2], None, context.dtype)
    return mergers.fused(module, context, _guarded(lambda x_ME: run(scaled.quantize_rows(x_ME))))


_guarded = partial(machine.guarded, machine.LINEARS)
