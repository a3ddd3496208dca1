"""Products of few tokens with the weights of several linears: one kernel that reads each weight once.

Libraries are written for many rows. With one token they read weights at three quarters of the rate, and with some they
divide narrow weights, which takes a second kernel to add up (H200). With one token, no tensor core is needed.

`T` tokens, `E` width, `F` outputs of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel.ops.launch import device_function, kernel, next_power_of_2, tl

MOST_TOKENS = 32
"""With more, a library's products are as fast."""
MOST_WEIGHTS = 3
_WIDE = 8192
"""From this width on, a program takes two outputs of one token. Down projection of 7B, 8B: 7%, 6% faster (H200)."""


def token_products_reference(x_TE: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Compute x W^T + b, (T, F), for every weight (F, E) and its bias (F)."""
    return [F.linear(x_TE, weight_FE, bias_F) for weight_FE, bias_F in zip(weights, biases, strict=True)]


@device_function
def _sums(
    x,
    weight,
    f,
    tokens,
    outputs,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Return W x^T in fp32, (BLOCK_F, BLOCK_T), for the outputs f."""
    row = f.to(tl.int64)[:, None] * WIDTH
    if BLOCK_T == 1:
        products = tl.zeros([BLOCK_F, BLOCK_E], tl.float32)
        for start in tl.range(0, WIDTH, BLOCK_E):
            e = start + tl.arange(0, BLOCK_E)
            x_e = tl.load(x + e, mask=e < WIDTH, other=0.0).to(tl.float32)
            inside = (f < outputs)[:, None] & (e < WIDTH)[None, :]
            products += tl.load(weight + row + e[None, :], mask=inside, other=0.0).to(tl.float32) * x_e[None, :]
        return tl.sum(products, axis=1, keep_dims=True)
    t = tl.arange(0, BLOCK_T)[None, :]
    sums = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        w = tl.load(weight + row + e[None, :], mask=(f < outputs)[:, None] & (e < WIDTH)[None, :], other=0.0)
        x_et = tl.load(x + t * WIDTH + e[:, None], mask=(t < tokens) & (e < WIDTH)[:, None], other=0.0)
        sums = tl.dot(w, x_et, acc=sums)
    return sums


@device_function
def _product(
    x,
    weight,
    bias,
    out,
    program,
    tokens,
    outputs,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write BLOCK_F outputs of one weight."""
    f = program * BLOCK_F + tl.arange(0, BLOCK_F)
    t = tl.arange(0, BLOCK_T)[None, :]
    y = _sums(x, weight, f, tokens, outputs, WIDTH, BLOCK_T, BLOCK_F, BLOCK_E)
    if HAS_BIAS:
        y += tl.load(bias + f, mask=f < outputs, other=0.0).to(tl.float32)[:, None]
    inside = (f < outputs)[:, None] & (t < tokens)
    tl.store(out + t * outputs + f[:, None], y.to(out.dtype.element_ty), mask=inside)


@kernel
def _token_products_kernel(
    x,
    weight1,
    weight2,
    weight3,
    bias1,
    bias2,
    bias3,
    out1,
    out2,
    out3,
    outputs1,
    outputs2,
    outputs3,
    tokens,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # The programs of the first weight come first, then those of the second.
    program = tl.program_id(0)
    end1 = tl.cdiv(outputs1, BLOCK_F)
    end2 = end1 + tl.cdiv(outputs2, BLOCK_F)
    if program < end1:
        _product(x, weight1, bias1, out1, program, tokens, outputs1, WIDTH, HAS_BIAS, BLOCK_T, BLOCK_F, BLOCK_E)
    elif program < end2:
        program -= end1
        _product(x, weight2, bias2, out2, program, tokens, outputs2, WIDTH, HAS_BIAS, BLOCK_T, BLOCK_F, BLOCK_E)
    else:
        program -= end2
        _product(x, weight3, bias3, out3, program, tokens, outputs3, WIDTH, HAS_BIAS, BLOCK_T, BLOCK_F, BLOCK_E)


def token_products(x_TE: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Run `token_products_reference` as one kernel, for up to three weights. All have a bias, or none has.

    All is contiguous, and there are at most `MOST_TOKENS` tokens.
    """
    tokens, width = x_TE.shape
    outs = [x_TE.new_empty(tokens, len(weight_FE)) for weight_FE in weights]
    sizes = [len(weight_FE) for weight_FE in weights]
    missing = MOST_WEIGHTS - len(weights)
    given = [x_TE if bias_F is None else bias_F for bias_F in biases]  # not read where there is none
    blocks = _blocks(tokens, width)
    _token_products_kernel[(sum(-(-size // blocks["BLOCK_F"]) for size in sizes),)](
        x_TE,
        *weights,
        *[x_TE] * missing,
        *given,
        *[x_TE] * missing,
        *outs,
        *[x_TE] * missing,
        *sizes,
        *[0] * missing,
        tokens,
        WIDTH=width,
        HAS_BIAS=biases[0] is not None,
        **blocks,
    )
    return outs


def _blocks(tokens: int, width: int) -> dict[str, Any]:
    """Return the constants of a kernel, the fastest of some that were measured with 7B and 8B (H200)."""
    if tokens > 1:
        block = max(next_power_of_2(tokens), 16)
        return {"BLOCK_T": block, "BLOCK_F": 32, "BLOCK_E": 128, "num_warps": 4, "num_stages": 4}
    if width >= _WIDE:
        return {"BLOCK_T": 1, "BLOCK_F": 2, "BLOCK_E": 1024, "num_warps": 2, "num_stages": 1}
    return {"BLOCK_T": 1, "BLOCK_F": 1, "BLOCK_E": 2048, "num_warps": 4, "num_stages": 1}


def token_swiglu_reference(x_TE: Tensor, gate_FE: Tensor, up_FE: Tensor) -> Tensor:
    """Compute silu(x G^T) * x U^T, (T, F), rounded like stock after the products, after silu and at the end."""
    return F.silu(F.linear(x_TE, gate_FE)) * F.linear(x_TE, up_FE)


@kernel
def _token_swiglu_kernel(
    x, gate, up, out, outputs, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr
):
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    dtype: tl.constexpr = out.dtype.element_ty
    g = _sums(x, gate, f, 1, outputs, WIDTH, BLOCK_T, BLOCK_F, BLOCK_E).to(dtype).to(tl.float32)
    u = _sums(x, up, f, 1, outputs, WIDTH, BLOCK_T, BLOCK_F, BLOCK_E).to(dtype).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    tl.store(out + f[:, None], (silu * u).to(dtype), mask=(f < outputs)[:, None])


def token_swiglu(x_1E: Tensor, gate_FE: Tensor, up_FE: Tensor) -> Tensor:
    """Run `token_swiglu_reference` as one kernel, for one token. All is contiguous.

    With 32 tokens, gate and up of 7B take 96 us so, and 76 by a library and `swiglu` (H200).
    """
    width = x_1E.shape[1]
    outputs = len(gate_FE)
    out_1F = x_1E.new_empty(1, outputs)
    blocks = _blocks(1, width)
    grid = (-(-outputs // blocks["BLOCK_F"]),)
    _token_swiglu_kernel[grid](x_1E, gate_FE, up_FE, out_1F, outputs, WIDTH=width, **blocks)
    return out_1F
