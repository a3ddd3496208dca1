"""The first half of an MLP in one kernel: its products over tensor descriptors, biases and activation.

SwiGLU is silu(x G^T + g) * (x U^T + u); quick_gelu is z * sigmoid(1.702 z) with z = x W^T + b.
`T` rows, `E` width, `F` width of the MLP, `G` that width rounded up to a multiple of 8.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.activation import cut_off, swiglu_reference
from hf_vit_accel.ops.launch import TensorDescriptor, for_descriptor, jit, next_power_of_2, tl


def linear_quick_gelu_reference(x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    """quick_gelu(x W^T + b), (T, F), rounded once, at the end (stock rounds four times)."""
    wide = torch.promote_types(x_TE.dtype, torch.float32)
    z_TF = F.linear(x_TE.to(wide), weight_FE.to(wide), bias_F.to(wide))
    return (z_TF * torch.sigmoid(1.702 * z_TF)).to(x_TE.dtype)


def linear_swiglu_reference(
    x_TE: Tensor,
    gate_FE: Tensor,
    up_FE: Tensor,
    gate_F: Tensor | None,
    up_F: Tensor | None,
    down_EF: Tensor,
    *,
    limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """What the last product of a SwiGLU MLP takes: the gated rows (T, G), and its weight (E, G); zeros beyond F.

    Rounded once, at the end (stock rounds both products, silu and the result).
    """
    wide = torch.promote_types(x_TE.dtype, torch.float32)
    gate_TF, up_TF = (
        F.linear(x_TE.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
        for weight, bias in ((gate_FE, gate_F), (up_FE, up_F))
    )
    spare = -gate_FE.shape[0] % 8
    return F.pad(swiglu_reference(gate_TF, up_TF, limit=limit).to(x_TE.dtype), (0, spare)), F.pad(down_EF, (0, spare))


@jit
def _linear_activation_kernel(
    x,
    weight,
    up,
    bias,
    up_bias,
    out,
    down,
    out_down,
    rows,
    limit,
    LIMITED: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    OUTER: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    COPY_ROWS: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
):
    # x, weight, up, out: descriptors, which read zeros and write nothing outside of their tensors.
    program = tl.program_id(0)
    tiles_t, tiles_f = tl.cdiv(rows, BLOCK_T), tl.cdiv(PADDED, BLOCK_F)
    if program < tiles_t * tiles_f:
        # GROUP tiles of rows share the weights' tiles while those are in the L2 cache.
        group = program // (GROUP * tiles_f)
        in_group = min(tiles_t - group * GROUP, GROUP)
        t = (group * GROUP + program % (GROUP * tiles_f) % in_group) * BLOCK_T
        f = program % (GROUP * tiles_f) // in_group * BLOCK_F
        a = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
        b = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
        for e in tl.range(0, INNER, BLOCK_E, num_stages=STAGES):
            rows_TE = x.load([t, e])
            a = tl.dot(rows_TE, weight.load([f, e]).T, a)
            if GATED:
                b = tl.dot(rows_TE, up.load([f, e]).T, b)
        at = f + tl.arange(0, BLOCK_F)
        if BIASED:
            a += tl.load(bias + at, mask=at < WIDTH, other=0.0).to(tl.float32)[None, :]
            if GATED:
                b += tl.load(up_bias + at, mask=at < WIDTH, other=0.0).to(tl.float32)[None, :]
        if GATED:
            if LIMITED:
                a, b = cut_off(a, b, limit)
            result = a * _sigmoid(a) * b
        else:
            result = a * _sigmoid(1.702 * a)
        out.store([t, f], result.to(out.dtype))
    else:
        # The programs after the tiles fill the last wave: each copies rows of the next product's weight.
        row = (program - tiles_t * tiles_f) * COPY_ROWS + tl.arange(0, COPY_ROWS)
        column = tl.arange(0, COPY_BLOCK)
        inside = (row < OUTER)[:, None] & (column < PADDED)[None, :]
        real = inside & (column < WIDTH)[None, :]
        values = tl.load(down + row[:, None] * WIDTH + column[None, :], mask=real, other=0.0)
        tl.store(out_down + row[:, None] * PADDED + column[None, :], values, mask=inside)


@jit
def _sigmoid(x):
    # The squared reciprocal root is half as many instructions as a division, and as exact to 2^-21.
    root = tl.rsqrt(1.0 + tl.exp(-x))
    return root * root


@lru_cache(maxsize=256)
def tile(rows: int, columns: int, multiprocessors: int) -> tuple[int, int]:
    """Rows of a tile and stages of its pipeline, for so many columns of tiles.

    Several programs of four warps share a multiprocessor, one's activation running during another's product: two with
    three stages, three with two (5% slower), four with two and half as many rows (which take 0.6 of the time). The
    fewest rounds win: on an H200, 784 rows of Qwen2-VL would be 280 tiles, two rounds of 264.
    """
    choices = ((128, 3, 2, 1.0), (128, 2, 3, 1.05), (64, 2, 4, 0.6))

    def cost(choice: tuple[int, int, int, float]) -> float:
        block_t, _, together, each = choice
        tiles = -(-rows // block_t) * columns
        return -(-tiles // (multiprocessors * together)) * together * each

    block_t, stages, _, _ = min(choices, key=cost)
    return block_t, stages


def _launch(
    x_TE: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    down_EF: Tensor,
    out_down_EG: Tensor,
    limit: float | None = None,
) -> Tensor:
    """weights (F, E) and biases (F): one of each, or gate's and up's. out_down_EG: down_EF itself is not copied."""
    (rows, inner), (width, _), gated = x_TE.shape, weights[0].shape, len(weights) == 2
    padded = -(-width // 8) * 8
    out_TG = x_TE.new_empty(rows, padded)
    block_f, block_e, group, copy_rows = 64 if gated else 128, 64, 16 if gated else 4, 4
    block_t, stages = tile(rows, -(-padded // block_f), machine.multiprocessors(x_TE.device))
    tiles = -(-rows // block_t) * -(-padded // block_f)
    copies = 0 if out_down_EG is down_EF else -(-down_EF.shape[0] // copy_rows)
    first, last = (TensorDescriptor.from_tensor(for_descriptor(weights[at]), [block_f, block_e]) for at in (0, -1))
    _linear_activation_kernel[(tiles + copies,)](
        TensorDescriptor.from_tensor(for_descriptor(x_TE), [block_t, block_e]),
        first,
        last,
        *(weights[0] if bias is None else bias.contiguous() for bias in (biases[0], biases[-1])),
        TensorDescriptor.from_tensor(out_TG, [block_t, block_f]),
        down_EF,
        out_down_EG,
        rows,
        limit or 0.0,
        LIMITED=limit is not None,
        BIASED=biases[0] is not None,
        GATED=gated,
        INNER=inner,
        WIDTH=width,
        PADDED=padded,
        OUTER=down_EF.shape[0],
        BLOCK_T=block_t,
        BLOCK_F=block_f,
        BLOCK_E=block_e,
        STAGES=stages,
        GROUP=group,
        COPY_ROWS=copy_rows,
        COPY_BLOCK=next_power_of_2(padded if copies else min(padded, 8192)),
        num_warps=4,
    )
    return out_TG


def linear_quick_gelu(x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    """`linear_quick_gelu_reference` as one kernel; E and F must be multiples of 8.

    At 16384 rows of Qwen2-VL on an H200: 360 us against 396 for the library's product and `quick_gelu_`.
    """
    return _launch(x_TE, (weight_FE,), (bias_F,), weight_FE, weight_FE)


def linear_swiglu(
    x_TE: Tensor,
    gate_FE: Tensor,
    up_FE: Tensor,
    gate_F: Tensor | None,
    up_F: Tensor | None,
    down_EF: Tensor,
    *,
    limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`linear_swiglu_reference` as one kernel; E must be a multiple of 8.

    Reads gate and up as they are, whatever F is; `down` is copied, by the same launch, only where F is not aligned. At
    16384 rows of Qwen2.5-VL on an H200: 460 us against 486 for the library's product of padded weights and `swiglu`,
    beside 25 for the padding.
    """
    width, outer = gate_FE.shape[0], down_EF.shape[0]
    down_EF = down_EF.contiguous()
    out_down_EG = down_EF if width % 8 == 0 else down_EF.new_empty(outer, -(-width // 8) * 8)
    return _launch(x_TE, (gate_FE, up_FE), (gate_F, up_F), down_EF, out_down_EG, limit), out_down_EG
