"""The MLPs' activations between their two matrix products.

`T` rows, `F` width of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hf_vit_accel.kernels.launch import jit

try:
    import triton.language as tl
except ImportError:  # pragma: no cover
    tl: Any = None  # type: ignore[no-redef]

__all__ = ["linear_gelu_tanh", "quick_gelu_", "quick_gelu_reference_", "swiglu", "swiglu_reference"]

_BLOCK = 1024


def linear_gelu_tanh(x_TE: torch.Tensor, weight_FE: torch.Tensor, bias_F: torch.Tensor) -> torch.Tensor:
    """gelu(x W^T + b) in its tanh form, (T, F), as an epilogue of the product (cuBLASLt).

    At 16384 rows of Qwen3-VL on an H200: 257 us against 313. `_addmm_activation` is private to torch but has been
    there, with these arguments, since 1.12. For CUDA only: on CPU it takes the erf form of GELU.
    """
    return torch._addmm_activation(bias_F, x_TE, weight_FE.t(), use_gelu=True)


def swiglu_reference(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of a packed (T, 2F), rounded after silu and after the product as stock does; (T, F)."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


@jit
def _swiglu_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + f, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + f, (silu * up).to(dtype), mask=inside)


def swiglu(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """`swiglu_reference` as one kernel."""
    rows, double = gate_up_T2F.shape
    assert gate_up_T2F.is_contiguous()
    out_TF = gate_up_T2F.new_empty(rows, double // 2)
    grid = rows, -(-double // 2 // _BLOCK)
    _swiglu_kernel[grid](gate_up_T2F, out_TF, WIDTH=double // 2, BLOCK=_BLOCK, num_warps=4)
    return out_TF


def quick_gelu_reference_(x_TF: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x), rounded after each of the three operations as stock does; the result is new."""
    return x_TF * torch.sigmoid(1.702 * x_TF)


@jit
def _quick_gelu_kernel(x, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scaled = (value * 1.702).to(dtype).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-scaled))).to(dtype).to(tl.float32)
    tl.store(x + at, (value * gate).to(dtype), mask=inside)


def quick_gelu_(x_TF: torch.Tensor) -> torch.Tensor:
    """`quick_gelu_reference_` as one kernel, in place."""
    assert x_TF.is_contiguous()
    _quick_gelu_kernel[(-(-x_TF.numel() // 4096),)](x_TF, x_TF.numel(), BLOCK=4096, num_warps=8)
    return x_TF
