"""Products of few tokens with the weights of several linears: one kernel that reads each weight once.

Libraries are written for many rows. With one token they read weights at three quarters of the rate, and with some they
divide narrow weights, which takes a second kernel to add up (H200). With one token, no tensor core is needed.

`T` tokens, `E` width, `F` outputs of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.launch import device_function, kernel, next_power_of_2, tl

MOST_TOKENS = 32
"""With more, a library's products with one weight are as fast."""
MOST_WEIGHTS = 3
_WIDTH_UNIT = 128
_WIDE = 8192
"""From this width on, a program takes two outputs of one token. Down projection of 7B, 8B: 11%, 12% faster (H200)."""


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


@kernel
def _products_kernel(
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
    # As above, in one loop: buffers of three would not fit into shared memory.
    program = tl.program_id(0)
    end1 = tl.cdiv(outputs1, BLOCK_F)
    end2 = end1 + tl.cdiv(outputs2, BLOCK_F)
    weight = weight1
    bias = bias1
    out = out1
    outputs = outputs1
    if program >= end2:
        program -= end2
        weight = weight3
        bias = bias3
        out = out3
        outputs = outputs3
    elif program >= end1:
        program -= end1
        weight = weight2
        bias = bias2
        out = out2
        outputs = outputs2
    f = program * BLOCK_F + tl.arange(0, BLOCK_F)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    # Past the end the first rows are read again, and not stored. Masks would take a fifth more time.
    row = (f % outputs).to(tl.int64)[:, None] * WIDTH
    row_of_x = (t % tokens)[None, :] * WIDTH
    sums = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        sums = tl.dot(tl.load(weight + row + e[None, :]), tl.load(x + row_of_x + e[:, None]), acc=sums)
    if HAS_BIAS:
        sums += tl.load(bias + f, mask=f < outputs, other=0.0).to(tl.float32)[:, None]
    inside = (f < outputs)[:, None] & (t < tokens)[None, :]
    tl.store(out + t[None, :] * outputs + f[:, None], sums.to(out.dtype.element_ty), mask=inside)


def is_faster(tokens: int, weights: Sequence[Tensor]) -> bool:
    """Return whether `token_products` is faster than a library, as measured with the weights of 7B and 8B (H200).

    With many tokens all programs have to run at once. Other GPUs than Hopper's have less shared memory, or were not
    measured.
    """
    if tokens <= MOST_TOKENS:
        return tokens == 1 or len(weights) > 1
    width = weights[0].shape[1]
    device = weights[0].device
    if len(weights) == 1 or width % _WIDTH_UNIT or device.type != "cuda":
        return False
    programs, of_tokens = _grid(tokens, width, [len(weight_FE) for weight_FE in weights])
    is_one_wave = programs * of_tokens <= machine.multiprocessors(device)
    return is_one_wave and machine.cuda_capability(device.index)[0] == 9


def token_products(x_TE: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Run `token_products_reference` as one kernel, for up to three weights. All have a bias, or none has.

    All is contiguous. For more than `MOST_TOKENS` tokens the width is a multiple of 128.
    """
    tokens, width = x_TE.shape
    outs = [x_TE.new_empty(tokens, len(weight_FE)) for weight_FE in weights]
    sizes = [len(weight_FE) for weight_FE in weights]
    missing = MOST_WEIGHTS - len(weights)
    given = [x_TE if bias_F is None else bias_F for bias_F in biases]  # not read where there is none
    run = _token_products_kernel if tokens <= MOST_TOKENS else _products_kernel
    run[_grid(tokens, width, sizes)](
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
        **_blocks(tokens, width),
    )
    return outs


def _grid(tokens: int, width: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the programs of all outputs, and of all tokens."""
    blocks = _blocks(tokens, width)
    return sum(-(-size // blocks["BLOCK_F"]) for size in sizes), -(-tokens // blocks["BLOCK_T"])


def _blocks(tokens: int, width: int) -> dict[str, int]:
    """Return the constants of a kernel, the fastest of some that were measured with 7B and 8B (H200)."""
    if tokens > 64:
        return {"BLOCK_T": 128, "BLOCK_F": 128, "BLOCK_E": 64, "num_warps": 8, "num_stages": 5}
    if tokens > MOST_TOKENS:
        return {"BLOCK_T": 64, "BLOCK_F": 64, "BLOCK_E": 128, "num_warps": 4, "num_stages": 5}
    if tokens > 1:
        block = max(next_power_of_2(tokens), 16)
        return {"BLOCK_T": block, "BLOCK_F": 64, "BLOCK_E": 128, "num_warps": 4, "num_stages": 4}
    if width >= _WIDE:
        return {"BLOCK_T": 1, "BLOCK_F": 2, "BLOCK_E": 512, "num_warps": 2, "num_stages": 1}
    return {"BLOCK_T": 1, "BLOCK_F": 1, "BLOCK_E": 2048, "num_warps": 4, "num_stages": 1}


def token_swiglu_reference(x_TE: Tensor, gate_FE: Tensor, up_FE: Tensor) -> Tensor:
    """Compute silu(x G^T) * x U^T, (T, F), rounded like stock after the products, after silu and at the end."""
    return F.silu(F.linear(x_TE, gate_FE)) * F.linear(x_TE, up_FE)


@kernel
def _token_swiglu_kernel(
    x,
    gate,
    up,
    out,
    tokens,
    outputs,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    t = tl.arange(0, BLOCK_T)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    if BLOCK_T == 1:
        g = _sums(x, gate, f, tokens, outputs, WIDTH, BLOCK_T, BLOCK_F, BLOCK_E)
        u = _sums(x, up, f, tokens, outputs, WIDTH, BLOCK_T, BLOCK_F, BLOCK_E)
    else:  # in one loop, which loads the tokens once
        row = f.to(tl.int64)[:, None] * WIDTH
        g = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
        u = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
        for start in tl.range(0, WIDTH, BLOCK_E):
            e = start + tl.arange(0, BLOCK_E)
            inside = (f < outputs)[:, None] & (e < WIDTH)[None, :]
            x_et = tl.load(x + t * WIDTH + e[:, None], mask=(t < tokens) & (e < WIDTH)[:, None], other=0.0)
            g = tl.dot(tl.load(gate + row + e[None, :], mask=inside, other=0.0), x_et, acc=g)
            u = tl.dot(tl.load(up + row + e[None, :], mask=inside, other=0.0), x_et, acc=u)
    g = g.to(dtype).to(tl.float32)
    u = u.to(dtype).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    tl.store(out + t * outputs + f[:, None], (silu * u).to(dtype), mask=(f < outputs)[:, None] & (t < tokens))


def token_swiglu(x_TE: Tensor, gate_FE: Tensor, up_FE: Tensor) -> Tensor:
    """Run `token_swiglu_reference` as one kernel. All is contiguous, and there are at most `MOST_TOKENS` tokens.

    With 32 tokens, a library's products and `swiglu` take 79 and 61 us (7B, 8B), this kernel 69 and 52 (H200).
    """
    tokens, width = x_TE.shape
    outputs = len(gate_FE)
    out_TF = x_TE.new_empty(tokens, outputs)
    blocks = _blocks(tokens, width)
    programs = -(-outputs // blocks["BLOCK_F"])
    if tokens > 1:
        # Three programs of three stages fit on a multiprocessor, and two of four.
        is_one_wave = programs <= 2 * machine.multiprocessors(x_TE.device)
        blocks |= {"BLOCK_E": 64, "num_stages": 4 if is_one_wave else 3}
    _token_swiglu_kernel[(programs,)](x_TE, gate_FE, up_FE, out_TF, tokens, outputs, WIDTH=width, **blocks)
    return out_TF
