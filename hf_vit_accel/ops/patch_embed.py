"""Patch embedding as one matrix product over flat patches: of a Linear, or of a convolution without overlap.

The convolution of 16384 patches takes 3048 us, the product 84 (H200). The weight is used through a view.

`T` rows, `P` pixels of a patch (channels * temporal * patch * patch), `E` width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel.families.base import Part, Parts
from hf_vit_accel.ops.base import Apply, Context, Operation
from hf_vit_accel.ops.product import trained_linear

READ = "stride", "kernel_size", "groups", "padding", "dilation"
"""Attributes of a convolution beside its weights; a Linear has none of them."""


def _reasons_against(parts: Parts, context: Context) -> list[str]:
    if id(parts.patch_embed) in context.hooked_parts:
        return ["it has hooks"]
    conv = parts.projection
    kind = next((kind for kind in (nn.Linear, nn.Conv2d, nn.Conv3d) if type(conv) is kind), nn.Conv3d)
    reasons = context.reasons_replaced(conv, kind) or ([] if kind is nn.Linear else reasons_overlapping(conv))
    return reasons or ([] if parts.patch_embed is conv else context.reasons_replaced(parts.patch_embed))


def reasons_overlapping(conv: Part) -> list[str]:
    """Report why a convolution is no product: its stride is not its kernel."""
    is_product = conv.stride == conv.kernel_size and conv.groups == 1 and set(conv.dilation) == {1}
    if is_product and (conv.padding == "valid" or not any(conv.padding)):
        return []
    return ["patch_embed.proj is not a convolution whose stride is its kernel"]


def _fused(parts: Parts, context: Context) -> Apply:
    convolution = parts.projection
    dtype = context.dtype
    cast = context.cast
    product = trained_linear if context.trains_by_kernels else F.linear
    for name in READ:
        context.read(convolution, name)

    def embed(pixels_TP: Tensor) -> Tensor:
        return product(pixels_TP.to(dtype), cast(convolution.weight).flatten(1), cast(convolution.bias))

    return embed


def _plain(parts: Parts, context: Context) -> Apply:
    module = context.called(parts.patch_embed)

    def embed(pixels_TP: Tensor) -> Tensor:
        if module is parts.projection:  # it takes patches in its own shape and dtype
            weight = module.weight
            pixels_TP = pixels_TP.to(weight.dtype).view(-1, *weight.shape[1:])
        # A copy, since kernels write to the residual stream in place and a module may keep its output.
        x_TE: Tensor = module(pixels_TP).flatten(1)
        return x_TE.clone(memory_format=torch.contiguous_format)

    return embed


OPERATION = Operation(
    name="patch_embed",
    summary="the convolution as one matrix product over the flattened weight",
    subjects=lambda parts: [parts],
    reasons_against=_reasons_against,
    fused=_fused,
    plain=_plain,
    triton=False,
)
