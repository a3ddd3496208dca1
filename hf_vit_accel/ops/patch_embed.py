"""Patch embedding as one matrix product.

`T` rows, `P` pixels of a patch (channels * temporal * patch * patch), `E` width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from hf_vit_accel.families.base import Parts
from hf_vit_accel.ops.base import Context, Operation

__all__ = ["OPERATION", "patch_embed"]


def patch_embed(pixels_TP: torch.Tensor, weight: torch.Tensor, bias_E: torch.Tensor | None) -> torch.Tensor:
    """The convolution whose stride is its kernel, over patches that are flattened already: a Linear over them.

    weight: (E, channels, temporal, patch, patch), used through a view, never copied. Returns (T, E) in its dtype.
    On an H200 the convolution of 16384 patches takes 3048 us, this 84.
    """
    return F.linear(pixels_TP.to(weight.dtype), weight.flatten(1), bias_E)


def _reasons_against(parts: Parts, context: Context) -> list[str]:
    conv = parts.projection
    if reasons := context.reasons_replaced(conv, nn.Conv3d):
        return reasons
    assert isinstance(conv, nn.Conv3d)
    if conv.stride != conv.kernel_size or conv.groups != 1 or any(conv.padding) or set(conv.dilation) != {1}:
        return ["patch_embed.proj is not a convolution whose stride is its kernel"]
    return context.reasons_replaced(parts.patch_embed)


def _fused(parts: Parts, context: Context) -> Callable[[torch.Tensor], torch.Tensor]:
    convolution, cast = parts.projection, context.cast
    for name in ("stride", "kernel_size", "groups", "padding", "dilation"):
        context.read(convolution, name)

    def embed(pixels_TP: torch.Tensor) -> torch.Tensor:
        bias_E = convolution.bias
        return patch_embed(pixels_TP, cast(convolution.weight), None if bias_E is None else cast(bias_E))

    return embed


def _plain(parts: Parts, context: Context) -> Callable[[torch.Tensor], torch.Tensor]:
    module = context.called(parts.patch_embed)
    # A copy: the residual stream is written in place, and a module may keep what it made.
    return lambda pixels_TP: module(pixels_TP).clone(memory_format=torch.contiguous_format)


OPERATION = Operation(
    name="patch_embed",
    summary="the convolution as one matrix product over the flattened weight",
    subjects=lambda parts: [parts],
    reasons_against=_reasons_against,
    fused=_fused,
    plain=_plain,
    triton=False,
)
