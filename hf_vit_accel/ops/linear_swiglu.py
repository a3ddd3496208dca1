"""A SwiGLU with its products in one kernel, over tensor descriptors: silu(x G^T + g) * (x U^T + u).

`T` rows, `E` width, `F` width of the MLP, `G` that width rounded up to a multiple of 8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.activation import cut_off, swiglu_reference
from hf_vit_accel.ops.launch import descriptor_of, device_function, kernel, next_power_of_2, tl


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
def _linear_swiglu_kernel(
    x,
    gate,
    up,
    gate_bias,
    up_bias,
    out,
    down,
    out_down,
    rows,
    limit,
    LIMITED: tl.constexpr,
    BIASED: tl.constexpr,
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
    # x, gate, up and out are descriptors: outside their tensors they read zeros and write nothing.
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
            a = tl.dot(rows_TE, gate.load([f, e]).T, a)
            b = tl.dot(rows_TE, up.load([f, e]).T, b)
        columns = f + tl.arange(0, BLOCK_F)
        if BIASED:
            a += tl.load(gate_bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
            b += tl.load(up_bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
        if LIMITED:
            a, b = cut_off(a, b, limit)
        out.store([t, f], (a * _sigmoid(a) * b).to(out.dtype))
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
    rows, inner = x_TE.shape
    width = gate_FE.shape[0]
    outer = down_EF.shape[0]
    padded = -(-width // 8) * 8
    down_EF = down_EF.contiguous()
    down_EG = down_EF if padded == width else down_EF.new_empty(outer, padded)
    out_TG = x_TE.new_empty(rows, padded)
    assert out_TG.data_ptr() % 16 == 0  # its descriptor must not be of a copy
    block_t = 128
    block_f = 64
    block_e = 64
    copy_rows = 4
    tiles = -(-rows // block_t) * -(-padded // block_f)
    # Programs share a multiprocessor, so that one's activation overlaps with another's product. With two stages three
    # programs fit, with three stages two. Two stages pay only where all tiles then run at once. 784 rows of Qwen2.5-VL
    # are 378 tiles: 33 us with two stages, 40 with three. 1024 rows are 432 tiles: 51 and 37 us (132 multiprocessors).
    multiprocessors = machine.multiprocessors(x_TE.device)
    stages = 2 if 2 * multiprocessors < tiles <= 3 * multiprocessors else 3
    copies = 0 if padded == width else -(-outer // copy_rows)
    _linear_swiglu_kernel[(tiles + copies,)](
        descriptor_of(x_TE, [block_t, block_e]),
        descriptor_of(gate_FE, [block_f, block_e]),
        descriptor_of(up_FE, [block_f, block_e]),
        gate_FE if gate_F is None else gate_F.contiguous(),  # not read without biases
        up_FE if up_F is None else up_F.contiguous(),
        descriptor_of(out_TG, [block_t, block_f]),
        down_EF,
        down_EG,
        rows,
        limit or 0.0,
        LIMITED=limit is not None,
        BIASED=gate_F is not None,
        INNER=inner,
        WIDTH=width,
        PADDED=padded,
        OUTER=outer,
        BLOCK_T=block_t,
        BLOCK_F=block_f,
        BLOCK_E=block_e,
        STAGES=stages,
        GROUP=16,
        COPY_ROWS=copy_rows,
        COPY_BLOCK=next_power_of_2(padded if copies else min(padded, 8192)),
        num_warps=4,
    )
    return out_TG, down_EG
