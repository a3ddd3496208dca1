"""The first half of an MLP in one kernel: products over tensor descriptors, biases and activation.

SwiGLU is silu(x G^T + g) * (x U^T + u); quick_gelu is z * sigmoid(1.702 z) with z = x W^T + b.
`T` rows, `E` width, `F` width of the MLP, `G` that width rounded up to a multiple of 8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.activation import cut_off, swiglu_reference
from hf_vit_accel.ops.launch import descriptor_of, device_function, kernel, next_power_of_2, tl


def linear_quick_gelu_reference(x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    """Compute quick_gelu(x W^T + b), (T, F), rounded once, at the end (stock rounds four times)."""
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
    """Compute what the last product of a SwiGLU MLP takes, with zeros beyond F.

    Rounding happens once, at the end (stock rounds both products, silu and the result).

    Returns:
        The SwiGLU's result, (T, G), and the last product's weight, (E, G).
    """
    wide = torch.promote_types(x_TE.dtype, torch.float32)
    gate_TF, up_TF = (
        F.linear(x_TE.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
        for weight, bias in ((gate_FE, gate_F), (up_FE, up_F))
    )
    padding = -gate_FE.shape[0] % 8
    h_TF = swiglu_reference(gate_TF, up_TF, limit=limit).to(x_TE.dtype)
    return F.pad(h_TF, (0, padding)), F.pad(down_EF, (0, padding))


@kernel
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
    # x, weight, up and out are descriptors: outside their tensors they read zeros and write nothing.
    program = tl.program_id(0)
    tiles_t = tl.cdiv(rows, BLOCK_T)
    tiles_f = tl.cdiv(PADDED, BLOCK_F)
    if program < tiles_t * tiles_f:
        # GROUP tiles of rows run one after the other, so that they find the weights' tiles in the L2 cache.
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
        columns = f + tl.arange(0, BLOCK_F)
        if BIASED:
            a += tl.load(bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
            if GATED:
                b += tl.load(up_bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
        if GATED:
            if LIMITED:
                a, b = cut_off(a, b, limit)
            result = a * _sigmoid(a) * b
        else:
            result = a * _sigmoid(1.702 * a)
        out.store([t, f], result.to(out.dtype))
    else:
        # The programs after the tiles fill the last wave: they copy rows of the next product's weight.
        row = (program - tiles_t * tiles_f) * COPY_ROWS + tl.arange(0, COPY_ROWS)
        column = tl.arange(0, COPY_BLOCK)
        inside = (row < OUTER)[:, None] & (column < PADDED)[None, :]
        real = inside & (column < WIDTH)[None, :]
        values = tl.load(down + row[:, None] * WIDTH + column[None, :], mask=real, other=0.0)
        tl.store(out_down + row[:, None] * PADDED + column[None, :], values, mask=inside)


@device_function
def _sigmoid(x):
    # The squared reciprocal root takes half as many instructions as a division; both agree to 2^-21.
    root = tl.rsqrt(1.0 + tl.exp(-x))
    return root * root


def _launch(
    x_TE: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    down_EF: Tensor,
    out_down_EG: Tensor,
    limit: float | None = None,
) -> Tensor:
    """Launch the kernel; return the activation's result, (T, G).

    Args:
        weights: (F, E); one, or gate's and up's.
        biases: (F) or None, one for each weight.
        out_down_EG: receives down's weight, padded; `down_EF` itself where nothing is to be copied.
    """
    rows, inner = x_TE.shape
    width = weights[0].shape[0]
    gated = len(weights) == 2
    padded = -(-width // 8) * 8
    out_TG = x_TE.new_empty(rows, padded)
    assert out_TG.data_ptr() % 16 == 0  # its descriptor must not be of a copy
    block_t = 128
    block_f = 64 if gated else 128
    block_e = 64
    copy_rows = 4
    tiles = -(-rows // block_t) * -(-padded // block_f)
    # Programs share a multiprocessor, so that one's activation overlaps with another's product. With two stages three
    # programs fit, with three stages two. Two stages pay only where all tiles then run at once. 784 rows of Qwen2.5-VL
    # are 378 tiles: 33 us with two stages, 40 with three. 1024 rows are 432 tiles: 51 and 37 us (132 multiprocessors).
    multiprocessors = machine.multiprocessors(x_TE.device)
    stages = 2 if 2 * multiprocessors < tiles <= 3 * multiprocessors else 3
    copies = 0 if out_down_EG is down_EF else -(-down_EF.shape[0] // copy_rows)
    _linear_activation_kernel[(tiles + copies,)](
        descriptor_of(x_TE, [block_t, block_e]),
        descriptor_of(weights[0], [block_f, block_e]),
        descriptor_of(weights[-1], [block_f, block_e]),
        weights[0] if biases[0] is None else biases[0].contiguous(),
        weights[0] if biases[-1] is None else biases[-1].contiguous(),
        descriptor_of(out_TG, [block_t, block_f]),
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
        GROUP=16 if gated else 4,
        COPY_ROWS=copy_rows,
        COPY_BLOCK=next_power_of_2(padded if copies else min(padded, 8192)),
        num_warps=4,
    )
    return out_TG


def linear_quick_gelu(x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    """Run `linear_quick_gelu_reference` as one kernel; E and F must be multiples of 8.

    From 4096 rows on it is as fast as the library's product with `quick_gelu_`, or faster. Qwen2-VL on an H100, us:
    41 and 35 (1296 rows), 56 and 54 (2048), 102 and 102 (4096), 201 and 210 (8192), 407 and 429 (16384).
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
    """Run `linear_swiglu_reference` as one kernel; E must be a multiple of 8.

    Gate and up are read as they are, for any F. The same launch copies `down_EF`, if F is not a multiple of 8. At
    16384 rows of Qwen2.5-VL: 460 us against 486 for the library's product and `swiglu`, and 25 for padding (H200).
    """
    width = gate_FE.shape[0]
    down_EF = down_EF.contiguous()
    out_down_EG = down_EF if width % 8 == 0 else down_EF.new_empty(down_EF.shape[0], -(-width // 8) * 8)
    return _launch(x_TE, (gate_FE, up_FE), (gate_F, up_F), down_EF, out_down_EG, limit), out_down_EG
