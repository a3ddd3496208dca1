"""Run FP8 attention in plain torch: in FP8's arithmetic, but with exact sums.

`T` rows, `H` heads, `D` head dim, `P` padded head dim.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hf_vit_accel.backends import base, cudnn_fp8
from hf_vit_accel.backends.cudnn_fp8 import CudnnFp8
from hf_vit_accel.ops.fp8.quantize import dequantize_reference, quantize_reference, sample_reference
from hf_vit_accel.ops.fp8.scales import E4M3

Tensors = tuple[Tensor, ...]


def quantize_on_cpu(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    used_1: torch.Tensor,
    scaling_43H: torch.Tensor,
    padded: int,
    *,
    fixed_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize by the references of the kernels, which write their amax to `scaling_43H`."""
    rows = int(used_1)
    center_HD, expected_3H = sample_reference(qkv, rows)
    if not fixed_scales:
        scaling_43H[:] = float("nan")  # the memory is empty before the kernel writes to it
        scaling_43H[0] = expected_3H
        scaling_43H[1] = 0
    out, scale_3H, amax_3H = quantize_reference(
        qkv, cos, sin, rows, center_HD, scaling_43H[0], padded, fixed_scales=fixed_scales
    )
    scaling_43H[1] = scaling_43H[1].maximum(amax_3H)
    scaling_43H[2] = scale_3H
    scaling_43H[3, 0, 0] = 1 / (scale_3H[0, 0] * scale_3H[1, 0])
    return out, center_HD


def attend_on_cpu(
    max_seqlen: int, scale: float, qkv: Tensors, sequences: Tensors, out_THP: Tensor, scales: Tensors
) -> None:
    """Attend within segments by offsets and lengths; rows of no segment become NaN.

    The first of `scales` is the product of those of q and k.
    """
    q_THP, k_THP, v_THP = (x_THP.float() for x_THP in qkv)
    lengths, offsets, *_ = sequences
    _, heads, padded = q_THP.shape
    starts = (offsets.flatten() // (heads * padded)).tolist()
    result_THP = torch.full(out_THP.shape, float("nan"))
    for start, length in zip(starts, lengths.flatten().tolist(), strict=False):
        assert length <= max_seqlen
        rows = slice(start, start + length)
        scores = torch.einsum("qhd,khd->hqk", q_THP[rows], k_THP[rows]) * scales[0] * scale
        result_THP[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_THP[rows])
    out_THP.copy_(result_THP)


def graph_on_cpu(
    qkv: Tensors, sequences: Tensors, max_seqlen: int, scale: float, out_dtype: torch.dtype
) -> SimpleNamespace:
    """Return a plan that runs on any machine; like Hopper's, it writes e4m3."""
    assert out_dtype == E4M3
    return SimpleNamespace(run=partial(attend_on_cpu, max_seqlen, scale))


def run_fp8_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FP8 attention run on any machine, by the functions above."""
    monkeypatch.setattr(CudnnFp8, "needs", base.Needs(cuda=False, head_dim_multiple=8, head_dim_max=128, kernels=True))
    monkeypatch.setattr(CudnnFp8, "probe", lambda self: [])
    monkeypatch.setattr(CudnnFp8, "prepare", lambda self, plan: None)
    monkeypatch.setattr(base, "why_not_triton", lambda device, dtype: None)
    monkeypatch.setattr(cudnn_fp8, "quantize", quantize_on_cpu)
    monkeypatch.setattr(cudnn_fp8, "dequantize", dequantize_reference)
    monkeypatch.setattr(cudnn_fp8, "cudnn_plan_for", graph_on_cpu)
    monkeypatch.setattr(cudnn_fp8, "machine", SimpleNamespace(cuda_capability=lambda index: (9, 0)))
