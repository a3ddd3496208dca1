"""Convolutions without overlap as one matrix product: the patch embedding, and one over each merge block.

The convolution of 16384 patches takes 3048 us, the product 84 (H200). The weight is used through a view. The patches of
a merge block are consecutive rows. `T` rows, `P` pixels of a patch (channels * temporal * patch * patch), `E` width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel.families.base import Part, Parts
from hf_vit_accel.ops.base import Apply, Context, Operation

_READ = "stride", "kernel_size", "groups", "padding", "dilation"
"""Attributes of a convolution beside its weights; a Linear has none of them."""


def _reasons_against_embed(parts: Parts, context: Context) -> list[str]:
    if id(parts.patch_embed) in context.hooked_parts:
        return ["it has hooks"]
    conv = parts.projection
    kind = next((kind for kind in (nn.Linear, nn.Conv2d, nn.Conv3d) if type(conv) is kind), nn.Conv3d)
    reasons = context.reasons_replaced(conv, kind) or ([] if kind is nn.Linear else _reasons_overlapping(conv))
    return reasons or ([] if parts.patch_embed is conv else context.reasons_replaced(parts.patch_embed))


def _reasons_overlapping(conv: Part) -> list[str]:
    """Report why a convolution is no product: its stride is not its kernel."""
    is_product = conv.stride == conv.kernel_size and conv.groups == 1 and set(conv.dilation) == {1}
    if is_product and (conv.padding == "valid" or not any(conv.padding)):
        return []
    return ["patch_embed.proj is not a convolution whose stride is its kernel"]


def _fused_embed(parts: Parts, context: Context) -> Apply:
    convolution = parts.projection
    dtype = context.dtype
    cast = context.cast
    for name in _READ:
        context.read(convolution, name)

    def embed(pixels_TP: Tensor) -> Tensor:
        return F.linear(pixels_TP.to(dtype), cast(convolution.weight).flatten(1), cast(convolution.bias))

    return embed


def _plain_embed(parts: Parts, context: Context) -> Apply:
    module = context.called(parts.patch_embed)

    def embed(pixels_TP: Tensor) -> Tensor:
        if module is parts.projection:  # it takes patches in its own shape and dtype
            weight = module.weight
            pixels_TP = pixels_TP.to(weight.dtype).view(-1, *weight.shape[1:])
        # A copy, since kernels write to the residual stream in place and a module may keep its output.
        x_TE: Tensor = module(pixels_TP).flatten(1)
        return x_TE.clone(memory_format=torch.contiguous_format)

    return embed


PATCH_EMBED = Operation(
    name="patch_embed",
    summary="the convolution as one matrix product over the flattened weight",
    subjects=lambda parts: [parts],
    reasons_against=_reasons_against_embed,
    fused=_fused_embed,
    plain=_plain_embed,
    triton=False,
)


def _reasons_against_downsample(conv: Part, context: Context) -> list[str]:
    return context.reasons_replaced(conv, nn.Conv2d) or _reasons_overlapping(conv)


def _fused_downsample(conv: Part, context: Context) -> Apply:
    cast = context.cast
    for name in _READ:
        context.read(conv, name)

    def downsample(x_TE: Tensor) -> Tensor:
        # Rows have their channels last, so the weight is copied in that order: a hundredth of the product's time.
        weight = cast(conv.weight).permute(0, 2, 3, 1).flatten(1)
        return F.linear(x_TE.reshape(-1, weight.shape[1]).to(weight.dtype), weight, cast(conv.bias))

    return downsample


def _plain_downsample(conv: Part, context: Context) -> Apply:
    conv = context.called(conv)

    def downsample(x_TE: Tensor) -> Tensor:
        x_MijE = x_TE.view(-1, *conv.kernel_size, x_TE.shape[-1])
        return Tensor.flatten(conv(x_MijE.permute(0, 3, 1, 2)), 1)

    return downsample


DOWNSAMPLE = Operation(
    name="downsample",
    summary="a convolution over each merge block as one matrix product",
    subjects=lambda parts: [] if parts.downsample is None else [parts.downsample],
    reasons_against=_reasons_against_downsample,
    fused=_fused_downsample,
    plain=_plain_downsample,
    triton=False,
    missing="the tower does not downsample",
)
