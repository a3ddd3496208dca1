"""cuDNN's attention in FP8 (e4m3), through FlashInfer as in `flashinfer_cudnn`; for full layers, where it is asked for.

On Hopper cuDNN writes FP8 attention in e4m3 only, and FlashInfer passes no scale for it. The output is a mix of rows of
v with weights that add up to one, so in v's quantised units it always fits and uses e4m3's range: v is declared to
have no scale, and the kernel that drops the padding multiplies by what v was divided by, head by head.

`T` packed rows, `S` segments, `H` heads, `D` head dim, `P` that dim padded.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.backends.base import Attend, Plan, Request
from hf_vit_accel.backends.flashinfer_cudnn import INT32_END, FlashinferCudnn, graph_for
from hf_vit_accel.layout import Segments
from hf_vit_accel.ops.fp8.e4m3 import E4M3
from hf_vit_accel.ops.fp8.quantize import dequantize, quantize
from hf_vit_accel.ops.fp8.scales import Scales
from hf_vit_accel.ops.launch import why_not_triton

MIN_SEQLEN = 5120
"""Rows of the segment that a row is in, on average, from which FP8 is faster than the best of the others (H200: a tower
of Qwen3-VL-8B with FlashAttention-3 and in FP8 takes 13.7 and 14.8 ms at 4096 rows, 19.3 and 18.6 at 5184)."""

_WEIGHTS_SCALE = 256.0
"""What softmax weights, at most 1, are multiplied by before they are rounded to e4m3: without it all those below 1/1000
of the largest would be lost, which in thousands of keys may be most of the sum."""


class CudnnFp8(FlashinferCudnn):
    """One kernel samples rows, one rotates, quantises and pads q, k and v, one call attends, one kernel unpads."""

    name = "cudnn_fp8"
    needs = replace(FlashinferCudnn.needs, capability=((9, 0), (13, 0)))

    def reasons_against(self, request: Request) -> list[str]:
        reasons = super().reasons_against(request)
        if request.kind != "full":
            reasons.append("windows are faster without FP8")
        if not request.packed:
            reasons.append("the stock blocks run, which rotate q and k themselves")
        unfit = None if request.fp8 is None else request.fp8.why_unfit()
        return reasons + [why for why in (why_not_triton(request.device, request.dtype), unfit) if why]

    def why_not_worth(self, segments: Segments, request: Request) -> str | None:
        """Why another backend is faster for a layout, or the only one that serves it; None if FP8 is."""
        lengths_S = segments.lengths_S.astype(np.int64)
        mean = float((lengths_S**2).sum() / lengths_S.sum())
        asked = None if request.fp8 is None else request.fp8.min_seqlen
        min_seqlen = MIN_SEQLEN if asked is None else asked
        if mean < min_seqlen:
            return f"rows attend to {mean:.0f} others on average, it is used from {min_seqlen} on"
        if not lengths_S.all():
            return "cuDNN's FP8 kernels crash on empty segments, which fill this graph's shape"
        if segments.rows * request.heads * _padded(request.head_dim) >= INT32_END:
            return f"{segments.rows} rows are more than its int32 offsets reach"
        return None

    def graph_bounds(self, segments: int, max_seqlen: int, rows: int) -> tuple[int, int]:
        return segments, rows

    def plan(self, segments: Segments, request: Request) -> Plan:
        # As many as there are: an empty segment that stands in for one is an illegal instruction to cuDNN 9.19 in FP8.
        cu_seqlens_S1 = segments.cu_seqlens_S1.astype(np.int64) * (request.heads * _padded(request.head_dim))
        arrays = {
            "lengths": segments.lengths_S.reshape(-1, 1, 1, 1),
            "offsets": cu_seqlens_S1.astype(np.int32).reshape(-1, 1, 1, 1),
            "used_1": np.array([segments.rows - segments.spare], dtype=np.int32),
            "one": np.ones(1, dtype=np.float32),
            "weights_scale": np.full(1, _WEIGHTS_SCALE, dtype=np.float32),
            "weights_descale": np.full(1, 1 / _WEIGHTS_SCALE, dtype=np.float32),
        }
        host = {"max_seqlen": round_max_seqlen(segments.max_seqlen)}
        return Plan(backend=self, segments=segments, request=request, host=host, arrays=arrays)

    def prepare(self, plan: Plan) -> None:
        request = plan.request
        row_THP = torch.empty(1, request.heads, _padded(request.head_dim), dtype=E4M3, device=request.device)
        _graph(plan, *(row_THP,) * 3)

    def attend_layers(self, plan: Plan, layers: int, rotate: Attend) -> list[Attend]:
        scales = plan.request.fp8
        assert scales is not None and scales.layers == layers
        return [partial(_attend_packed, plan, scales, layer) for layer in range(layers)]

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        scales = Scales(device=q_THD.device, layers=1, heads=q_THD.shape[1])
        still = q_THD.new_zeros(1, q_THD.shape[2]).expand(q_THD.shape[0], -1)
        return _attend_packed(plan, scales, 0, torch.stack((q_THD, k_THD, v_THD), dim=1), still + 1, still.contiguous())


def round_max_seqlen(length: int) -> int:
    """The longest segment to declare: at most 1/32 more, so that lengths share plans.

    In FP8 cuDNN works for the declared length: 9216 rows declared as 16384 took 1245 us on an H200, as 9216 718.
    """
    step = max(128, 1 << max(length.bit_length() - 6, 0))
    return -(-length // step) * step


def _padded(head_dim: int) -> int:
    """What is fastest on an H200, at any length: 128 for 72 and 80 (1736 us at 14416 rows; 96: 1837, 80: 2029)."""
    return 64 if head_dim <= 64 else 128


def _written(request: Request) -> torch.dtype:
    """The dtype of the output: Hopper writes e4m3 alone."""
    return request.dtype if machine.cuda_capability(request.device.index)[0] >= 10 else E4M3


def _graph(plan: Plan, q_THP: Tensor, k_THP: Tensor, v_THP: Tensor) -> Any:
    """cuDNN's plan, and the lengths and offsets that it takes."""
    request, sequences = plan.request, (plan.tensors["lengths"], *(plan.tensors["offsets"],) * 4)
    length, written = plan.host["max_seqlen"], _written(request)
    return graph_for((q_THP, k_THP, v_THP), sequences, length, request.scale, written), sequences


def _attend_packed(plan: Plan, scales: Scales, layer: int, qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """One layer: packed projection (T, 3, H, D), cos and sin to attended rows (T, H, D)."""
    dim, heads = qkv_T3HD.shape[-1], qkv_T3HD.shape[-2]
    if qkv_T3HD.stride()[1:] != (heads * dim, dim, 1):
        qkv_T3HD = qkv_T3HD.contiguous()
    used_1, call_43H, final = plan.tensors["used_1"], scales.call(layer), scales.fixed is not None
    qkv_3THP, center_HD = quantize(qkv_T3HD, cos_TD, sin_TD, used_1, call_43H, _padded(dim), final=final)
    out_THP = _attend(plan, qkv_3THP, call_43H[3, 0, :1])
    return dequantize(out_THP, call_43H[2, 2], center_HD, qkv_T3HD.dtype)


def _attend(plan: Plan, qkv_3THP: Tensor, descale_1: Tensor) -> Tensor:
    """cuDNN's call: rows (T, H, P) in v's quantised units."""
    out_THP = torch.empty_like(qkv_3THP[0], dtype=_written(plan.request))
    qkv, one = qkv_3THP.unbind(0), plan.tensors["one"]
    graph, sequences = _graph(plan, *qkv)
    # Of q and k only the product matters: it is declared for q. v's own units come back.
    scales = descale_1, one, one, plan.tensors["weights_scale"], plan.tensors["weights_descale"], one
    graph.run(qkv, sequences, out_THP, scales)
    return out_THP
