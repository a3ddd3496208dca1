"""A convolution over each merge block as one matrix product: the block's patches are consecutive rows.

`T` rows, `M` merge blocks, `E` width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel.families.base import Part
from hf_vit_accel.ops.base import Apply, Context, Operation
from hf_vit_accel.ops.patch_embed import READ, reasons_overlapping
from hf_vit_accel.ops.product import trained_linear


def _reasons_against(conv: Part, context: Context) -> list[str]:
    return context.reasons_replaced(conv, nn.Conv2d) or reasons_overlapping(conv)


def _fused(conv: Part, context: Context) -> Apply:
    product = trained_linear if context.trains_by_kernels else F.linear
    cast = context.cast
    for name in READ:
        context.read(conv, name)

    def downsample(x_TE: Tensor) -> Tensor:
        # Rows have their channels last, so the weight is copied in that order: a hundredth of the product's time.
        weight = cast(conv.weight).permute(0, 2, 3, 1).flatten(1)
        return product(x_TE.reshape(-1, weight.shape[1]).to(weight.dtype), weight, cast(conv.bias))

    return downsample


def _plain(conv: Part, context: Context) -> Apply:
    conv = context.called(conv)

    def downsample(x_TE: Tensor) -> Tensor:
        x_MijE = x_TE.view(-1, *conv.kernel_size, x_TE.shape[-1])
        return Tensor.flatten(conv(x_MijE.permute(0, 3, 1, 2)), 1)

    return downsample


OPERATION = Operation(
    name="downsample",
    summary="a convolution over each merge block as one matrix product",
    subjects=lambda parts: [] if parts.downsample is None else [parts.downsample],
    reasons_against=_reasons_against,
    fused=_fused,
    plain=_plain,
    triton=False,
    missing="the tower does not downsample",
)
