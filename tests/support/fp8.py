"""Run FP8 attention in plain torch: in FP8's arithmetic, but with exact sums.

`T` rows, `H` heads, `D` head dim, `P` padded head dim.
"""

from __future__ import annotations

import pytest
import torch

from hf_vit_accel.backends import Needs, Plan, cudnn_fp8
from hf_vit_accel.backends.cudnn_fp8 import CudnnFp8
from hf_vit_accel.ops.fp8.e4m3 import E4M3
from hf_vit_accel.ops.fp8.quantize import dequantize_reference, quantize_reference, sample_reference


def quantize_on_cpu(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    used_1: torch.Tensor,
    call_43H: torch.Tensor,
    padded: int,
    *,
    final: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize by the references of the kernels, which write their amax to `call_43H`."""
    rows = int(used_1)
    center_HD, expected_3H = sample_reference(qkv, rows)
    if not final:
        call_43H[:] = float("nan")  # the memory is empty before the kernel writes to it
        call_43H[0] = expected_3H
        call_43H[1] = 0
    out, scale_3H, amax_3H = quantize_reference(qkv, cos, sin, rows, center_HD, call_43H[0], padded, final=final)
    call_43H[1] = call_43H[1].maximum(amax_3H)
    call_43H[2] = scale_3H
    call_43H[3, 0, 0] = 1 / (scale_3H[0, 0] * scale_3H[1, 0])
    return out, center_HD


def attend_on_cpu(plan: Plan, qkv_3THP: torch.Tensor, descale_1: torch.Tensor) -> torch.Tensor:
    """Attend within segments by offsets and lengths, as cuDNN does; rows of no segment stay NaN."""
    out_THP = torch.full(qkv_3THP.shape[1:], float("nan"))
    _, _, heads, padded = qkv_3THP.shape
    starts = (plan.tensors["offsets"].flatten() // (heads * padded)).tolist()
    for start, length in zip(starts, plan.tensors["lengths"].flatten().tolist(), strict=False):
        assert length <= plan.host["max_seqlen"]
        rows = slice(start, start + length)
        q, k, v = qkv_3THP[:, rows].float()
        scores = torch.einsum("qhd,khd->hqk", q, k) * descale_1 * plan.request.scale
        out_THP[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out_THP.to(E4M3)


def run_fp8_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FP8 attention run on any machine, by the functions above."""
    monkeypatch.setattr(CudnnFp8, "needs", Needs(cuda=False, head_dim_multiple=8, head_dim_max=128))
    monkeypatch.setattr(CudnnFp8, "probe", lambda self: [])
    monkeypatch.setattr(CudnnFp8, "prepare", lambda self, plan: None)
    monkeypatch.setattr(cudnn_fp8, "why_not_triton", lambda device, dtype: None)
    monkeypatch.setattr(cudnn_fp8, "quantize", quantize_on_cpu)
    monkeypatch.setattr(cudnn_fp8, "dequantize", dequantize_reference)
    monkeypatch.setattr(cudnn_fp8, "_attend", attend_on_cpu)
    monkeypatch.setattr(cudnn_fp8, "_written", lambda request: E4M3)
